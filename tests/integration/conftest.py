"""What several files and folders need here."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.contract.conftest import Heard


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The paths of a certificate for `localhost`, and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.fixture
async def heard() -> Heard:
    return Heard()
