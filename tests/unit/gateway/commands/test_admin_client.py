from __future__ import annotations

import pytest

from gateway.commands.admin_client import AdminClient
from shared.core.errors import ConfigError, StartError
from tests.ports import free_port


@pytest.mark.parametrize("url", ["127.0.0.1:8001", "localhost:8001", "file:///etc/hosts", ""])
def test_an_address_that_is_no_url_is_named_with_one_that_is(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--admin: '.*' is not allowed; give a URL such as http://127\.0\.0\.1:8001$"
    ):
        AdminClient(url, None).ask("GET", "/status")


def test_no_answer_is_given_in_the_words_of_the_system() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(StartError) as refused:
        AdminClient(url, None).ask("GET", "/status")
    assert str(refused.value) == (
        f"no gateway answers at {url}/status: Connection refused; give its admin address with --admin"
    )
