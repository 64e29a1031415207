"""LEV for anybody's model, in the place of `torch.nn.Embedding`."""

from typing import Any

import torch
from torch import Tensor

from leviathan.config.embedding import LeviathanConfig
from leviathan.config.load import validate
from leviathan.config.schema import ModelConfig
from leviathan.errors import ConfigError
from leviathan.model.embedding.leviathan import LeviathanEmbedding as _LeviathanEmbedding
from leviathan.model.init import draw_values


class LeviathanEmbedding(_LeviathanEmbedding):
    """Maps token ids to vectors as `torch.nn.Embedding` does, from far fewer parameters.

        embedding = LeviathanEmbedding(200_019, 1024)   # 1.7M parameters in place of 205M
        vectors = embedding(ids)                        # ids of any shape, dtype and device

    There is no `weight`, so an output head cannot be tied to it; `materialize()` gives the table.
    The parameters' names are those in a native checkpoint under `model.embed_tokens`.

    Attributes:
        num_embeddings: V.
        embedding_dim: D.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **lev: Any,
    ) -> None:
        """Makes and initializes the module.

        Args:
            num_embeddings: V, the number of ids.
            embedding_dim: D, the width of the vectors.
            seed: of the initial values; omitted, it comes from torch's global generator, so that
                `torch.manual_seed` rules here as it does for torch's own modules.
            device: as for `torch.nn.Embedding`; on "meta" nothing is drawn.
            dtype: as for `torch.nn.Embedding`.
            **lev: fields of `LeviathanConfig`: digits, base, d_seed, heads, knots, rank,
                latent_scale, embedding_init_std.

        Raises:
            ConfigError: an unknown field or a wrong value.
        """
        config = _config(num_embeddings, embedding_dim, lev)
        super().__init__(config)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        if not self.out_weight.is_meta:
            self._draw(config, seed)
        self.to(device=device, dtype=dtype or torch.get_default_dtype())

    def forward(
        self, ids: Tensor, unique_ids: Tensor | None = None, inverse: Tensor | None = None
    ) -> Tensor:
        """Vectors `[*, D]` of integer ids `[*]`; work follows the distinct ids.

        Args:
            ids: any shape, integer dtype and device (the module's).
            unique_ids: `[U]` the distinct ids, where they are known already.
            inverse: with `unique_ids[inverse] == ids`.

        Raises:
            IndexError: an id is outside [0, V) (on CUDA a device-side assertion).
            TypeError: ids that are no integers.
        """
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"token ids are integers; these are {ids.dtype}")
        return super().forward(ids.long(), unique_ids, inverse)

    def extra_repr(self) -> str:
        """As `torch.nn.Embedding` shows itself."""
        return f"{self.num_embeddings}, {self.embedding_dim}"

    @torch.no_grad()
    def _draw(self, config: ModelConfig, seed: int | None) -> None:
        with torch.device("cpu"):  # whatever device context the caller is in
            if seed is None:
                seed = int(torch.randint(2**62, ()))
            for name, how in self.init_spec(config).items():
                parameter = self.get_parameter(name)
                parameter.copy_(draw_values(name, parameter.shape, how, seed))
            self.calibrate(config)


def _config(vocabulary: int, d_model: int, fields: dict[str, Any]) -> ModelConfig:
    """What the internal class reads of a model's configuration, and nothing of a body."""
    where = "LeviathanEmbedding"
    for name, value in (("num_embeddings", vocabulary), ("embedding_dim", d_model)):
        if value < 1:
            raise ConfigError(
                "embedding.invalid", f"{where}: {name}: found {value}, expected at least 1"
            )
    lev = validate(fields, LeviathanConfig, where, {})
    try:
        lev = lev.resolved(vocabulary, d_model)
    except ValueError as error:
        raise ConfigError("embedding.invalid", f"{where}: {error}") from None
    # Not validated: any width will do for an embedding, a body would need an even one per head.
    return ModelConfig.model_construct(
        d_model=d_model,
        n_layers=1,
        n_heads=1,
        vocab_size=vocabulary,
        padded_vocab_size=vocabulary,
        embedding=lev,
    )
