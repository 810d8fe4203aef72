"""Reference models: what the weights of the supported families are imported into."""

from bridge.models._attention import Attention as Attention
from bridge.models._attention import dot_product_attention as dot_product_attention
from bridge.models._config import DecoderConfig as DecoderConfig
from bridge.models._config import RopeConfig as RopeConfig
from bridge.models._decoder import Decoder as Decoder
from bridge.models._decoder import DecoderLayer as DecoderLayer
from bridge.models._decoder import plain_scan as plain_scan
