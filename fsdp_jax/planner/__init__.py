"""What a step will need and where its time goes, without the GPUs it is for."""
