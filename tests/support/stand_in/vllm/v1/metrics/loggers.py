"""What a plugin of vLLM's has to be a subclass of."""


class StatLoggerBase:
    def log(self) -> None: ...
