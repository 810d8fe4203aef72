"""Conversion of any PyTorch model, by given or proposed rules; shards of verl."""

from bridge.pytorch._verl import VerlCheckpoint as VerlCheckpoint
from bridge.pytorch._verl import VerlOptimizer as VerlOptimizer
from bridge.pytorch._verl import is_verl as is_verl
from bridge.pytorch._verl import open_verl as open_verl
