"""The one name that the worker takes from here."""


class RequestOutputKind:
    FINAL_ONLY = "final only"
