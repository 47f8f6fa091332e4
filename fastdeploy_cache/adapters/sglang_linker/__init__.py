"""The whole cache below SGLang's own tree: a linker between its device pools and our CPU tier, storage and ranks."""
