"""Which model is taken when nobody named one."""

from __future__ import annotations

import pytest

from gateway.bench.run import first_model
from shared.core.errors import StartError


def test_the_first_that_has_a_name() -> None:
    assert first_model({"supported_models": [{}, {"model_name": "a"}, {"model_name": "b"}]}, "u") == "a"


@pytest.mark.parametrize("capabilities", [{}, {"supported_models": []}, {"supported_models": None}])
def test_a_gateway_without_models_is_named(capabilities: dict[str, object]) -> None:
    with pytest.raises(StartError, match="the gateway at u offers no model; name one with --model"):
        first_model(capabilities, "u")
