"""Falcon Mamba: Mamba 1 with norms in the mixer that do not scale.

Source: transformers `configuration_falcon_mamba.py`, `modeling_falcon_mamba.py`.
"""

import dataclasses

from bridge.families import mamba
from bridge.families._family import Field

FAMILY = dataclasses.replace(
    mamba.FAMILY,
    model_type="falcon_mamba",
    architecture="FalconMambaForCausalLM",
    fields={
        **mamba.FAMILY.fields,
        "mixer_rms_eps": Field(1e-6, "mamba1.norm_eps"),
    },
    constants={
        **mamba.FAMILY.constants,
        "mamba1.norm": True,
        "mamba1.norm_scale": False,
    },
    passthrough={**mamba.FAMILY.passthrough, "use_falcon_mambapy": False},
)
