"""Weights for a rollout engine: HF names, tensor by tensor, in process or by socket."""

from bridge.handover._named_tensors import named_tensors as named_tensors
from bridge.handover._send import Sent as Sent
from bridge.handover._send import send_weights as send_weights
from bridge.handover.receiver import ReceivedWeights as ReceivedWeights
from bridge.handover.receiver import receive_weights as receive_weights
