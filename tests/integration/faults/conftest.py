from campaign import url  # noqa: F401 - a fixture
from judged import case  # noqa: F401
