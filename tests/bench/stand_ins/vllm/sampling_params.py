from types import SimpleNamespace

RequestOutputKind = SimpleNamespace(DELTA="new tokens")
