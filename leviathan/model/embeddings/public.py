"""LEV as a replacement of `torch.nn.Embedding` in any model."""

from typing import Any

import torch
from torch import Tensor

from leviathan.config.embeddings.leviathan import LeviathanConfig
from leviathan.config.load import validate
from leviathan.config.run import ModelConfig
from leviathan.errors import ConfigError
from leviathan.model.embeddings.leviathan import LeviathanEmbedding as _LeviathanEmbedding
from leviathan.model.init import draw_values


class LeviathanEmbedding(_LeviathanEmbedding):
    """Maps token ids to vectors like `torch.nn.Embedding`, with far fewer parameters.

        embedding = LeviathanEmbedding(200_019, 1024)   # 1.7M parameters instead of 205M
        vectors = embedding(ids)                        # ids of any shape, dtype and device

    There is no `weight`, so an output head cannot be tied to it; `materialize()` returns the table.
    The names of the parameters are those under `model.embed_tokens` in a checkpoint.

    Attributes:
        num_embeddings: V, the number of ids.
        embedding_dim: D, the width of the vectors.
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
        """Creates and initializes the module.

        Args:
            num_embeddings: V, the number of ids.
            embedding_dim: D, the width of the vectors.
            seed: seed of the initial values; default: drawn from the global generator of torch, so
                that `torch.manual_seed` applies as to the modules of torch.
            device: as for `torch.nn.Embedding`; on "meta", values are not initialized.
            dtype: as for `torch.nn.Embedding`.
            **lev: fields of `LeviathanConfig`: digits, base, d_seed, heads, knots, rank,
                latent_scale, embedding_init_std.

        Raises:
            ConfigError: an unknown field or an invalid value.
        """
        model, config = _config(num_embeddings, embedding_dim, lev)
        super().__init__(model, config)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        if not self.out_weight.is_meta:
            self._draw(model, seed)
        self.to(device=device, dtype=dtype or torch.get_default_dtype())

    def forward(
        self, ids: Tensor, unique_ids: Tensor | None = None, inverse: Tensor | None = None
    ) -> Tensor:
        """Vectors `[*, D]` of integer ids `[*]`, computed once per distinct id.

        Args:
            ids: integers of any shape, on the device of the module.
            unique_ids: distinct ids, `[U]`, if already known.
            inverse: indices such that `unique_ids[inverse] == ids`.

        Raises:
            IndexError: an id is outside [0, V) (on CUDA a device-side assertion).
            TypeError: the ids are not integers.
        """
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"token ids must be integers, got {ids.dtype}")
        return super().forward(ids.long(), unique_ids, inverse)

    def extra_repr(self) -> str:
        """Extra text of `repr`, as in `torch.nn.Embedding`."""
        return f"{self.num_embeddings}, {self.embedding_dim}"

    @torch.no_grad()
    def _draw(self, model: ModelConfig, seed: int | None) -> None:
        with torch.device("cpu"):  # regardless of the device context of the caller
            if seed is None:
                seed = int(torch.randint(2**62, ()))
            for name, how in self.init_spec(model).items():
                parameter = self.get_parameter(name)
                parameter.copy_(draw_values(name, parameter.shape, how, seed))
            self.calibrate()


def _config(
    vocabulary: int, d_model: int, fields: dict[str, Any]
) -> tuple[ModelConfig, LeviathanConfig]:
    """The parts of a model configuration that the embedding requires."""
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
    # Not validated: the width may be odd, which the attention of a transformer would not allow.
    model = ModelConfig.model_construct(
        d_model=d_model,
        n_layers=1,
        n_heads=1,
        vocab_size=vocabulary,
        padded_vocab_size=vocabulary,
        embedding=lev,
    )
    return model, lev
