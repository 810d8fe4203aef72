"""What `import bridge` costs, and what it never needs."""

import subprocess
import sys
from pathlib import Path

import bridge


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    root = Path(bridge.__file__).parents[1]
    run = [sys.executable, "-c", code]
    output = subprocess.run(run, cwd=root, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in output.stdout.split()}


def test_import_bridge_loads_nothing_that_it_can_do_without():
    loaded = loaded_by("import bridge")
    assert "bridge" in loaded
    assert not loaded & {"torch", "transformers", "safetensors", "huggingface_hub"}
    assert "fsdp_jax" not in loaded
