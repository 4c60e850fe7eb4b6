"""For whoever tests a storage backend: a conformance suite, a filesystem that fails on demand, real servers."""
