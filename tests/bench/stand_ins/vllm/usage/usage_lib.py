from types import SimpleNamespace

UsageContext = SimpleNamespace(LLM_CLASS="offline")
