"""A table that is shared with the output head."""

from torch import nn

from leviathan.model.embeddings.untied import UntiedEmbedding


class TiedEmbedding(UntiedEmbedding):
    """A `V × D` table that is also the weight of the output head: the main baseline."""

    @property
    def output_weight(self) -> nn.Parameter:
        """The table itself."""
        return self.weight
