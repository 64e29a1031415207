"""The configuration of a dataset: `leviathan prep CONFIG.yaml`."""

from typing import Literal

from pydantic import Field, model_validator

from leviathan.config.base import (
    ByteCount,
    Dimension,
    NonNegativeFloat,
    Paths,
    PositiveInt,
    Strict,
    UserPath,
)


class HubConfig(Strict):
    """A dataset of the Hugging Face Hub, or a local directory that `datasets` can load."""

    id: str = Field(
        description="dataset on the Hugging Face Hub (owner/name), or a local directory"
    )
    config: str | None = Field(
        default=None, description="configuration (subset) of the Hub dataset; null: its only one"
    )
    split: str = Field(
        default="train", description="splits to read: a name, several (train+test), or all"
    )
    revision: str | None = Field(
        default=None, description="branch, tag or commit; null: the default branch"
    )
    text_column: str = Field(
        default="text",
        description="text column or dotted path; validation.hub inherits it from source.hub",
    )
    subset_column: str | None = Field(
        default=None,
        description="subset column or dotted path; validation.hub inherits it from source.hub",
    )


class SubsetsConfig(Strict):
    """The subsets to keep."""

    include: Paths = Field(
        default_factory=list, description="names of the subsets to keep; all others are excluded"
    )
    exclude: Paths = Field(default_factory=list, description="names of the subsets to exclude")

    @model_validator(mode="after")
    def _one_of_them(self) -> "SubsetsConfig":
        if self.include and self.exclude:
            raise ValueError("include and exclude exclude each other; set one of them")
        return self


class SourceConfig(Strict):
    """The input. Files of a directory or glob are read in name order."""

    paths: Paths = Field(
        default_factory=list, description="files, globs, directories or URLs, read in this order"
    )
    hub: HubConfig | None = None
    text_key: str = Field(
        default="text", min_length=1, description="key, column or dotted path of the text"
    )
    subset_key: str = Field(
        default="meta.pile_set_name",
        min_length=1,
        description="key, column or dotted path of the subset name",
    )
    default_subset: str = Field(
        default="unnamed", min_length=1, description="subset of documents without a subset name"
    )
    subsets: SubsetsConfig = Field(default_factory=SubsetsConfig)

    @model_validator(mode="after")
    def _one_kind(self) -> "SourceConfig":
        if not self.paths and self.hub is None:
            raise ValueError("no input: set source.paths or source.hub")
        if self.paths and self.hub is not None:
            raise ValueError("paths and hub exclude each other (paths=[] removes the paths)")
        return self


class ValidationConfig(Strict):
    """The validation split: separate files, or a fraction of the documents by hash."""

    paths: Paths = Field(
        default_factory=list, description="files, globs or directories of held-out documents"
    )
    hub: HubConfig | None = Field(
        default=None, description="held-out split of a Hub dataset, instead of paths"
    )
    fraction: float = Field(
        default=0.005,
        ge=0,
        lt=1,
        strict=False,
        description="fraction of documents held out by content hash; ignored with paths or hub",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "ValidationConfig":
        if self.paths and self.hub is not None:
            raise ValueError("paths and hub exclude each other; set one of them")
        return self


class PrepConfig(Strict):
    """A dataset to prepare: `leviathan prep CONFIG.yaml`."""

    source: SourceConfig
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    tokenizer: str = Field(
        description="tiktoken encoding such as o200k_base, a .tiktoken file, or a directory with "
        "one"
    )
    seq_len: Dimension = Field(
        default=512, description="sample length in tokens; a sample stores one id more"
    )
    out: UserPath = Field(description="output directory of the dataset")
    workers: PositiveInt = Field(
        default=1, description="number of worker processes; does not affect the output"
    )
    executor: Literal["local", "ray", "rank"] = Field(
        default="local",
        description="where to tokenize: local processes, a Ray cluster, or one slice per rank of a "
        "job array",
    )
    on_error: Literal["fail", "quarantine"] = Field(
        default="fail",
        description="action on an invalid record: fail, or quarantine (skip it and list it in "
        "rejects.jsonl)",
    )
    max_reject_fraction: float = Field(
        default=0.01,
        ge=0,
        le=1,
        strict=False,
        description="maximum fraction of rejected records; the first 100 are always allowed",
    )
    max_document_bytes: ByteCount = Field(
        default=1 << 28,
        description="maximum size of a document in bytes, which bounds the memory; larger "
        "documents are rejected",
    )
    deduplicate: bool = Field(
        default=False, description="keep one document of each set of identical texts"
    )
    backend: Literal["auto", "gigatoken", "tiktoken"] = Field(
        default="auto", description="encoder implementation; does not affect the ids"
    )
    mixing: dict[str, NonNegativeFloat] = Field(
        default_factory=dict,
        description="number of epochs per subset in the training split; 1 for subsets not named",
    )

    @model_validator(mode="after")
    def _read_validation_as_source(self) -> "PrepConfig":
        """Copies the columns of source.hub to validation.hub unless it sets its own."""
        source, held_out = self.source.hub, self.validation.hub
        if source is None or held_out is None:
            return self
        inherited = {
            name: getattr(source, name)
            for name in ("text_column", "subset_column")
            if name not in held_out.model_fields_set
        }
        hub = held_out.model_copy(update=inherited)
        # The model is frozen, but a validator of a model under construction may still set fields.
        object.__setattr__(self, "validation", self.validation.model_copy(update={"hub": hub}))
        return self
