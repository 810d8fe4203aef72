"""Pipeline parallelism: schedules, point-to-point communication, gradients."""
