"""A test that cannot run without torch says so, for the lane that has none."""

from pathlib import Path

import pytest
from helpers.marks import has_module_mark, unmarked


def test_tests_that_need_torch_are_marked():
    folder = Path(__file__).parent
    files = {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*.py")
    }
    assert unmarked(files) == [], (
        "these import torch or transformers when they are imported: a test module "
        "then needs `pytestmark = pytest.mark.torch`; a conftest.py imports them, "
        "and helpers that do, inside its fixtures"
    )


def test_a_planted_unmarked_test_is_caught():
    files = {
        "bridge/test_direct.py": "import torch",
        "bridge/test_format.py": "from safetensors.torch import load_file",
        "bridge/test_helped.py": "from tiny import make",
        "bridge/tiny.py": "from transformers import AutoConfig",
        "bridge/conftest.py": "import tiny",
        "test_far.py": "from helpers import far",
        "helpers/far.py": "from helpers.near import make",
        "helpers/near.py": "import transformers",
        "test_marked.py": "import torch\npytestmark = pytest.mark.torch",
        "test_inside.py": "def test():\n    import torch",
        "test_free.py": "import jax",
    }
    assert unmarked(files) == [
        "bridge/conftest.py",
        "bridge/test_direct.py",
        "bridge/test_format.py",
        "bridge/test_helped.py",
        "test_far.py",
    ]


@pytest.mark.parametrize(
    "source, marked",
    [
        ("pytestmark = pytest.mark.torch", True),
        ("pytestmark = [pytest.mark.long, pytest.mark.torch]", True),
        ("pytestmark = pytest.mark.long", False),
        ("@pytest.mark.torch\ndef test(): ...", False),  # of one test, not the module
        ("# pytestmark = pytest.mark.torch", False),
    ],
)
def test_a_mark_is_read_from_the_source(source, marked):
    assert has_module_mark(source, "torch") == marked
