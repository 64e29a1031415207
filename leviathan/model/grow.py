"""Extends the vocabulary of a trained model whose input embedding has no vector per id."""

from leviathan.config.embedding import DigitConfig
from leviathan.errors import ConfigError
from leviathan.model.init import draw_values, init_rules
from leviathan.model.transformer import CausalLM


def grow_vocabulary(
    model: CausalLM, vocab_size: int, padded_vocab_size: int | None = None, *, seed: int
) -> CausalLM:
    """Returns a copy of a model with a larger vocabulary; every parameter is copied exactly.

    The input embedding is a function of digits and already defined for b^k ids, so none of its
    parameters changes; the output head gets new rows. The rows of padding ids are initialized
    again, because they received no gradient.

    Args:
        model: a model whose embedding is generated from digits; it is not modified.
        vocab_size: vocabulary size of the new tokenizer, in which the old ids are unchanged.
        padded_vocab_size: rows of the new head; default: `vocab_size`.
        seed: seed of the new rows, initialized as at step 0.

    Raises:
        ConfigError: another kind of embedding, a smaller vocabulary, or more ids than b^k.
    """
    config, old = model.config, model.config.vocab_size
    rows = vocab_size if padded_vocab_size is None else padded_vocab_size
    embedding = config.embedding
    if not isinstance(embedding, DigitConfig) or embedding.base is None:
        raise ConfigError(
            "grow.unsupported",
            f"an input embedding of kind {embedding.kind!r} cannot grow: its parameters depend "
            "on the vocabulary size. Only kinds that are generated from digits can grow "
            "(leviathan)",
        )
    if vocab_size < old or rows < vocab_size:
        raise ConfigError(
            "grow.shrinks",
            f"cannot grow from {old:,} ids to {vocab_size:,} in {rows:,} rows: the vocabulary "
            "cannot shrink, and each id needs a row",
        )
    room = embedding.base**embedding.digits
    if rows > room:
        raise ConfigError(
            "grow.too_large",
            f"cannot grow to {rows:,} ids: {embedding.digits} digits in base "
            f"{embedding.base} represent at most {room:,} ids",
        )
    larger = config.model_copy(update={"vocab_size": vocab_size, "padded_vocab_size": rows})
    grown, state = CausalLM(larger).to(model.lm_head.weight), model.state_dict()
    head, how = grown.lm_head.weight, init_rules(grown, larger)["lm_head.weight"]
    new = draw_values("lm_head.weight", head.shape, how, seed).to(head)
    new[:old] = state["lm_head.weight"][:old]
    grown.load_state_dict({**state, "lm_head.weight": new})
    return grown.train(model.training)
