from judged import case  # noqa: F401 - a fixture
