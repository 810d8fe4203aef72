"""Where no GPU can be, nobody is told with a traceback that there is none."""

import logging

import pytest

from fsdp_jax.cli import _no_driver, main

JAX = logging.getLogger("jax._src.xla_bridge")
COMPLAINT = "Jax plugin configuration error: Exception when calling x.initialize()"


@pytest.fixture
def heard(caplog, monkeypatch):
    """What is heard of jax after a command, where a driver is or is not."""

    def listen(driver: str) -> list[str]:
        monkeypatch.setattr(_no_driver, "_DRIVER", driver)
        JAX.removeFilter(_no_driver._COMPLAINT)
        assert main(["verify", "nowhere"]) == 2
        JAX.error(COMPLAINT)
        JAX.error("Another thing is wrong.")
        return caplog.messages

    yield listen
    JAX.removeFilter(_no_driver._COMPLAINT)


def test_without_a_driver_the_plugin_does_not_complain(heard):
    assert heard("libno_such_driver.so.1") == ["Another thing is wrong."]


def test_with_a_driver_it_does(heard):
    assert heard("libc.so.6") == [COMPLAINT, "Another thing is wrong."]
