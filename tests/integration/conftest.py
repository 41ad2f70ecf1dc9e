"""A server that is somebody else's, for the tests of a file."""

import pytest
from interfaces import somebodys_server


@pytest.fixture(scope="module")
def there():
    with somebodys_server() as found:
        yield found
