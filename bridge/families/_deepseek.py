"""Parts shared by DeepSeek V2, V3 and others: experts and latent attention."""

from bridge.families._blocks import Rules, ignore_tied_head, mlp
from bridge.families._family import Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, tokens
from bridge.models import DecoderConfig
from bridge.rules._rules import Rule

FIELDS = {
    **{name: field for name, field in SIZES.items() if name != "head_dim"},
    **tokens(1, 2),
    "rms_norm_eps": Field(1e-6, "norm_eps"),
    "attention_bias": Field(False, ("attention_bias", "attention_out_bias")),
    "kv_lora_rank": Field(512, "mla.kv_lora_rank"),
    "q_lora_rank": Field(1536, "mla.q_lora_rank"),
    "qk_rope_head_dim": Field(64, "mla.qk_rope_head_dim"),
    "qk_nope_head_dim": Field(128, "mla.qk_nope_head_dim"),
    "v_head_dim": Field(128, "mla.v_head_dim"),
}
FIXED = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "moe_layer_freq": 1,
}
PASSTHROUGH = {
    "output_router_logits": False,
    "aux_loss_alpha": None,
    "seq_aux": None,
    "ep_size": None,
    "router_aux_loss_coef": None,
}


def shared_experts(
    default: int | None, count: str = "n_shared_experts"
) -> FieldTransform:
    """Reads how many experts all tokens share; they are one MLP, so many times wider.

    Args:
      default: What transformers takes where the file does not say.
      count: The field.
    """
    width = "moe_intermediate_size"

    def read(fields):
        shared = fields[count]
        if not shared:
            raise ValueError(f"{count} = {shared!r}: only 1 or more are modelled")
        return {"moe.shared_intermediate_size": shared * fields[width]}

    def write(config: DecoderConfig):
        moe = config.moe
        assert moe is not None and moe.shared_intermediate_size is not None
        return {count: moe.shared_intermediate_size // moe.intermediate_size}

    return FieldTransform((count,), read, write, {count: default})


def shared(config: DecoderConfig) -> Rules:
    """Rules of the shared experts."""
    return mlp(config, "mlp.shared_experts.", "mlp.shared_expert.", "shared_mlp")


SIGMOID_ROUTER = {
    "moe.scoring": "sigmoid",
    "moe.group_scoring": "top2_sum",
    "moe.correction_bias": True,
    "moe.float32_logits": True,
}
"""Traits of V3's router, which other families have too."""

CORRECTION_BIAS = Rule(
    "mlp.gate.e_score_correction_bias",
    "mlp.router.correction_bias",
    "experts -> experts",
)


def corrected_and_shared(config: DecoderConfig) -> Rules:
    """Rules of the shared experts and of V3's correction bias."""
    return (CORRECTION_BIAS, *shared(config))


FURTHER = "num_nextn_predict_layers"
"""The field that counts layers that predict further tokens, behind the last."""


def ignore_further(config: DecoderConfig) -> tuple[str, ...]:
    """The tensors of those layers, and of a tied head."""
    further = dict(config.passthrough)[FURTHER] or 0
    last = config.num_hidden_layers
    layers = tuple(f"model.layers.{last + i}.**" for i in range(further))
    return layers + ignore_tied_head(config)


# transformers derives these from the others; a file that says otherwise is refused.
def derived_sizes(*, whole: bool = False) -> FieldTransform:
    """Reads sizes that follow from others.

    Args:
      whole: Whether `head_dim` of these files is that of a query; else it is the part
        of it that turns.
    """

    def read(fields):
        rope, nope = fields["qk_rope_head_dim"], fields["qk_nope_head_dim"]
        all_dims = rope + nope
        expected = {"head_dim": all_dims if whole else rope, "qk_head_dim": all_dims}
        wrong = [
            f"{name} = {fields[name]!r}: the other sizes say {value}"
            for name, value in expected.items()
            if fields.get(name) not in (None, value)
        ]
        if wrong:
            raise ValueError("\n".join(wrong))
        return {}

    names = ("head_dim", "qk_head_dim")
    return FieldTransform(names, read, lambda config: {}, dict.fromkeys(names))


DERIVED_SIZES = derived_sizes()
"""`head_dim` of these files is the rotary part of a head, and follows."""
