"""A corpus preparation as the user writes it: `leviathan prep CONFIG.yaml`."""

from typing import Literal

from pydantic import Field, model_validator

from leviathan.config.strict import NonNegativeFloat, Paths, PositiveInt, Strict, UserPath


class HubConfig(Strict):
    """A dataset of the Hugging Face Hub, or a local folder that `datasets` loads."""

    id: str = Field(description="owner/name, or a folder")
    config: str | None = Field(default=None, description="its configuration, where it has several")
    split: str = Field(
        default="train", description="splits to read: one name, several (train+test), or all"
    )
    revision: str | None = Field(default=None, description="branch, tag or commit")
    text_column: str = Field(
        default="text",
        description="text column or dotted path; validation.hub inherits it from source.hub",
    )
    subset_column: str | None = Field(
        default=None,
        description="subset column or dotted path; validation.hub inherits it from source.hub",
    )


class SubsetsConfig(Strict):
    """Which subsets to keep: those named, or all but those named."""

    include: Paths = Field(default_factory=list, description="names of subsets; nothing else stays")
    exclude: Paths = Field(default_factory=list, description="names of subsets; the rest stays")

    @model_validator(mode="after")
    def _one_of_them(self) -> "SubsetsConfig":
        if self.include and self.exclude:
            raise ValueError("give include or exclude, not both")
        return self


class SourceConfig(Strict):
    """What to read, in this order; inside a folder or a glob, in name order."""

    paths: Paths = Field(default_factory=list, description="files, globs, folders or URLs")
    hub: HubConfig | None = None
    text_key: str = Field(
        default="text", min_length=1, description="key, column or dotted path of the text"
    )
    subset_key: str = Field(
        default="meta.pile_set_name",
        min_length=1,
        description="key, column or dotted path of the subset's name",
    )
    default_subset: str = Field(
        default="unnamed", min_length=1, description="of documents that name none"
    )
    subsets: SubsetsConfig = Field(default_factory=SubsetsConfig)

    @model_validator(mode="after")
    def _one_kind(self) -> "SourceConfig":
        if not self.paths and self.hub is None:
            raise ValueError("nothing to read: give source.paths or source.hub")
        if self.paths and self.hub is not None:
            raise ValueError("give paths or hub, not both (paths=[] takes the paths away)")
        return self


class ValidationConfig(Strict):
    """Where the validation split comes from: own shards, or a share of the documents by hash."""

    paths: Paths = Field(default_factory=list, description="held-out files, globs or folders")
    hub: HubConfig | None = Field(default=None, description="in place of paths")
    fraction: float = Field(
        default=0.005, ge=0, lt=1, strict=False, description="by content hash; unused with paths"
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "ValidationConfig":
        if self.paths and self.hub is not None:
            raise ValueError("give paths or hub, not both")
        return self


class PrepConfig(Strict):
    """One corpus preparation: `leviathan prep CONFIG.yaml`."""

    source: SourceConfig
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    tokenizer: str = Field(description="a tiktoken name such as o200k_base, or a .tiktoken file")
    seq_len: PositiveInt = Field(default=512, description="tokens; a row has one more")
    out: UserPath = Field(description="folder of the dataset")
    workers: PositiveInt = Field(default=1, description="processes; never changes a byte")
    executor: Literal["local", "ray", "rank"] = Field(
        default="local", description="where: processes here, a Ray cluster, one slice a rank"
    )
    on_error: Literal["fail", "quarantine"] = Field(
        default="fail", description="at a bad line: end, or leave it out and list it"
    )
    max_reject_fraction: float = Field(
        default=0.01, ge=0, le=1, strict=False, description="of bad lines, beyond the first 100"
    )
    max_document_bytes: PositiveInt = Field(
        default=1 << 28, description="longer lines are bad lines; bounds memory"
    )
    drop_duplicates: bool = Field(default=False, description="keep one of each equal text")
    backend: Literal["auto", "gigatoken", "tiktoken"] = Field(
        default="auto", description="what encodes; never changes an id"
    )
    mixing: dict[str, NonNegativeFloat] = Field(
        default_factory=dict, description="epochs of the training split by subset; 1 if not named"
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
