"""More ids for a trained model whose input embedding has no row per id."""

from leviathan.config.embedding import DigitConfig
from leviathan.errors import ConfigError
from leviathan.model.init import draw_values, init_rules
from leviathan.model.transformer import CausalLM


def grow_vocabulary(
    model: CausalLM, vocab_size: int, padded_vocab_size: int | None = None, *, seed: int
) -> CausalLM:
    """A copy of a model that knows more ids: every parameter is taken over bit by bit.

    The input embedding is a function of digits, so b^k ids have vectors already and none of its
    parameters changes; the output head gets new rows. The rows of padding ids are initialized
    again, because they received no gradient.

    Args:
        model: of a kind that generates from digits; it is left as it is.
        vocab_size: ids of the new tokenizer; the old ids must mean what they meant.
        padded_vocab_size: rows of the new head; `vocab_size` if omitted.
        seed: of the new rows, drawn as at step 0.

    Raises:
        ConfigError: another kind, fewer ids than before, or more than the digits tell apart.
    """
    config, old = model.config, model.config.vocab_size
    rows = vocab_size if padded_vocab_size is None else padded_vocab_size
    embedding = config.embedding
    if not isinstance(embedding, DigitConfig) or embedding.base is None:
        raise ConfigError(
            "grow.unsupported",
            f"an input embedding of kind {embedding.kind!r} cannot grow: its parameters depend on "
            "the vocabulary's size; kinds that generate from digits can (leviathan)",
        )
    if vocab_size < old or rows < vocab_size:
        raise ConfigError(
            "grow.shrinks",
            f"cannot grow from {old:,} ids to {vocab_size:,} in {rows:,} rows: ids are never taken "
            "away, and each needs a row",
        )
    room = embedding.base**embedding.digits
    if rows > room:
        raise ConfigError(
            "grow.too_large",
            f"cannot grow to {rows:,} ids: {embedding.digits} digits in base {embedding.base} tell "
            f"{room:,} apart; at most that many fit without changing the input embedding",
        )
    larger = config.model_copy(update={"vocab_size": vocab_size, "padded_vocab_size": rows})
    grown, state = CausalLM(larger).to(model.lm_head.weight), model.state_dict()
    head, how = grown.lm_head.weight, init_rules(grown, larger)["lm_head.weight"]
    new = draw_values("lm_head.weight", head.shape, how, seed).to(head)
    new[:old] = state["lm_head.weight"][:old]
    grown.load_state_dict({**state, "lm_head.weight": new})
    return grown.train(model.training)
