"""Compares greedy generation with a cache to transformers' Llama, and between kinds.

python benchmarks/generate.py [--json] [--rounds N] [--device cuda]

Leviathan's table is materialized once when a model is loaded; a separate line reports this time.
"""

from functools import partial

import torch
from harness import Report, arguments, paired, ready, seconds
from torch import Tensor

from leviathan.config.run import ModelConfig
from leviathan.hf.export import llama_state, quiet_transformers
from leviathan.model.init import init_weights
from leviathan.model.kv_cache import (
    DecodeState,
    Sampling,
    generate,
    pick,
    with_materialized_embedding,
)
from leviathan.model.transformer import CausalLM

VOCABULARY = 200_019
PADDED = 200_376
PROMPT, NEW = 64, 64  # tokens
NEVER = -1  # an end-of-text id that no token has
SHAPES = {
    "cpu": {"v1_60m": (256, 6, 4)},
    "cuda": {"200m": (640, 12, 10), "1.2b": (2048, 12, 32)},
}


def build(shape: tuple[int, int, int], kind: str, device: torch.device) -> CausalLM:
    """Builds a model with initial weights and a materialized input table."""
    width, layers, heads = shape
    config = ModelConfig.model_validate(
        {"d_model": width, "n_layers": layers, "n_heads": heads, "embedding": {"kind": kind}}
        | {"vocab_size": VOCABULARY, "padded_vocab_size": PADDED}
    )
    model = CausalLM(config)
    init_weights(model, config, seed=0)
    model = model.to(device)
    if device.type == "cuda":
        model = model.bfloat16()
    return model.eval()


def llama(model: CausalLM, device: torch.device):
    """Builds transformers' model with the same weights."""
    config = model.config
    hf = quiet_transformers()
    settings = hf.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        max_position_embeddings=config.seq_len,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        tie_word_embeddings=model.lm_head.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    dtype = model.lm_head.weight.dtype
    with torch.device("meta"):
        other = hf.LlamaForCausalLM(settings)
    state = llama_state(model, config, dtype)
    if model.lm_head.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    other.load_state_dict(state, assign=True)
    other.tie_weights()
    other.model.rotary_emb = type(other.model.rotary_emb)(config=settings)  # off the meta device
    return other.to(device).eval()


def continuation(model: CausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """Returns the tokens that `generate` adds."""
    made: list[list[int]] = [[] for _ in prompts]

    def on_token(row: int, token: int) -> bool:
        made[row].append(token)
        return True

    generate(model, prompts, NEW, NEVER, on_token)
    return made


def in_step(ours: CausalLM, other: CausalLM, ids: Tensor) -> tuple[float, float]:
    """Returns the seconds of both models to continue the same prompts, alternating per token.

    Both perform the same work with the same code, so the ratio must be precise to a hundredth.
    Alternating per token exposes both to the same changes in machine speed.
    """
    device, taken = ids.device, [0.0, 0.0]
    sides: list[DecodeState] = []

    def begin(model: CausalLM) -> None:
        sides.append(DecodeState(model, ids.tolist()))

    def one_token(decoding: DecodeState) -> None:
        decoding.append(pick(decoding.logits(), Sampling(), torch.zeros(len(ids))))

    with torch.no_grad():
        for place, model in enumerate((ours, other)):
            taken[place] += seconds(partial(begin, model), device)
        for number in range(NEW):
            for place in (0, 1) if number % 2 else (1, 0):
                taken[place] += seconds(partial(one_token, sides[place]), device)
    return taken[0], taken[1]


def measure(
    report: Report, name: str, shape: tuple[int, int, int], rounds: int, device: torch.device
) -> None:
    """Measures one shape with one prompt and with eight prompts."""
    ours = build(shape, "leviathan", device)
    report.figure(
        f"{name}: the table, once", seconds(ours.model.embed_tokens.materialize, device), "s"
    )
    table, tied = with_materialized_embedding(ours), build(shape, "tied", device)
    other = llama(ours, device)
    ids = torch.randint(0, VOCABULARY, (8, PROMPT), device=device)
    for batch in (1, 8):
        prompts = ids[:batch].tolist()
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        options["attention_mask"] = torch.ones_like(ids[:batch])

        def theirs(batch: int = batch, options: dict = options) -> list[list[int]]:
            return other.generate(ids[:batch], **options)[:, PROMPT:].tolist()

        if device.type == "cpu":
            assert continuation(table, prompts) == theirs(), "not the same text"
        case = f"{name}: {batch} × ({PROMPT} + {NEW}) tokens"
        pairs = paired(lambda p=prompts: continuation(table, p), theirs, rounds, device)
        report.compare(case, pairs, "transformers' Llama", "s", "≥ 1.0")
        median = sorted(mine for mine, _ in pairs)[len(pairs) // 2]
        report.figure(case, batch * NEW / median, "tokens/s")
        pairs = [in_step(table, tied, ids[:batch]) for _ in range(rounds)]
        report.compare(f"{case}, Leviathan", pairs, "tied", "s", "≤ 1.02")


def main() -> None:
    """Command line."""
    options = arguments(__doc__ or "", rounds=7).parse_args()
    device = ready(options.device)
    report = Report("generate", options.json)
    for name, shape in SHAPES[device.type].items():
        measure(report, name, shape, options.rounds, device)


if __name__ == "__main__":
    main()
