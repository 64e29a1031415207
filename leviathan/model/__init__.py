"""The model. This buffer size bounds its memory, which `leviathan.estimate.memory` counts."""

CHUNK_LOGITS = 2**26  # logits per chunk of the head: 256 MiB of fp32
