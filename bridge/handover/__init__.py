"""Weights for a rollout engine: HF names, tensor by tensor, in process or by socket."""

from bridge.handover._changes import TensorChanges as TensorChanges
from bridge.handover._changes import WeightSnapshot as WeightSnapshot
from bridge.handover._changes import changed_weights as changed_weights
from bridge.handover._changes import snapshot_weights as snapshot_weights
from bridge.handover._named_tensors import named_tensors as named_tensors
from bridge.handover._send import Sent as Sent
from bridge.handover._send import send_weights as send_weights
from bridge.handover._send_changes import send_changes as send_changes
from bridge.handover.receiver import ReceivedChanges as ReceivedChanges
from bridge.handover.receiver import ReceivedWeights as ReceivedWeights
from bridge.handover.receiver import receive_changes as receive_changes
from bridge.handover.receiver import receive_weights as receive_weights
