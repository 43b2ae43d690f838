"""Mode `lean`: per-sequence meshes, balanced packing into any slice, one merged stream."""
