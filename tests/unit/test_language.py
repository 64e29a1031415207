"""The code and the documentation use the field's standard words, in American spelling.

Run on its own by `make check`. A word that is right in one place has an exception with a reason.
"""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
SUFFIXES = {".py", ".md", ".yaml", ".toml", ".sh", ".sbatch"}
PLACES = ("leviathan", "tests", "benchmarks", "docs", "configs", "data_prep", "launch", "eval")
PLACES += ("examples", "README.md", "CONTRIBUTING.md", "Makefile")

# Identifiers, configuration keys and types that were replaced → their names now.
REPLACED = {
    "Accounting": "ModelStats",
    "Asked": "CheckOptions",
    "BadLine": "RejectedRecord",
    "Choice": "Selection",
    "Decoding": "DecodeState",
    "FILLER": "PADDING_SAMPLE",
    "ForeignRows": "ForeignShardReader",
    "Gathered": "LoadedRuns",
    "GroupPeers": "ProcessTPGroup",
    "IDS_A_CALL": "IDS_PER_CALL",
    "LEAST_ITEMS": "MIN_ITEMS_PER_WORKER",
    "LEAST_S": "MIN_INTERVAL_S",
    "LEAST_SHARED": "MIN_SHARED_BYTES",
    "LEAST_SIDE": "MIN_SIDE",
    "LEFT_BEHIND": "LEFTOVERS",
    "Ledger": "WorkDir",
    "Loaded": "LoadedCheckpoint",
    "MOST_GROUP": "MAX_GROUP",
    "MOST_SHARE": "MAX_SHARE",
    "MOST_WORKERS": "MAX_WORKERS",
    "ModesPath": "LevBackend",
    "NOT_THE_ARM": "NOT_IN_ARM",
    "NothingToTrainOn": "EmptyTrainingSplit",
    "OneRankError": "LocalRankError",
    "PUBLISH_ANEW": "PUBLISH_AGAIN",
    "PartInfo": "TokenizedFileInfo",
    "Peers": "TPGroup",
    "Picture": "ReportFigure",
    "Pictures": "ReportFigures",
    "ProfileWish": "ProfileConfig",
    "Recipe": "DatasetSpec",
    "RemoteRows": "RemoteShardReader",
    "RowIds": "SampleIds",
    "RowOrder": "ShuffleOrder",
    "RowScorer": "SequenceScorer",
    "SETTLE_S": "REPORT_DELAY_S",
    "STUDY_FILE": "EXPERIMENT_FILE",
    "SaveHandle": "SaveFuture",
    "ShardRows": "ShardSamples",
    "Slice": "FlatShard",
    "StepClock": "StepTimer",
    "Strata": "FrequencyBuckets",
    "Stretch": "StreamRange",
    "Study": "Experiment",
    "StudyConfig": "ExperimentConfig",
    "StudyFile": "ExperimentFile",
    "StudyRun": "ExperimentRun",
    "TextConfig": "TinyCorpusConfig",
    "TrainStream": "TrainLoader",
    "Unusable": "InvalidRecord",
    "VERDICT_S": "LOST_RANK_GRACE_S",
    "Verdict": "Level",
    "and_list": "join_with_and",
    "assemble": "build_dataset",
    "bad_lines": "rejected_records",
    "both_splits": "split_selections",
    "boxes_of": "chunks_of",
    "check_file": "check_writable_file",
    "check_folder": "check_writable_dir",
    "check_out": "check_output_dir",
    "check_room": "check_disk_space",
    "check_rows": "check_records",
    "describe_study": "describe_experiment",
    "draft_dir": "staging_dir",
    "drop_duplicates": "deduplicate",
    "emit_study": "emit_experiment",
    "file_system": "open_filesystem",
    "find_start": "find_resume_point",
    "first_start": "new_resume_point",
    "from_earlier": "computed_default",
    "geometry_pictures": "geometry_figures",
    "hang_up": "close",
    "keep_pages": "keep_freed_memory",
    "lay_out": "index_stream",
    "layout_of": "parallel_layout",
    "leave_out": "skip",
    "lev_rows": "lev_vectors",
    "load_described": "load_checkpoint",
    "load_slices": "load_shards",
    "load_study": "load_experiment",
    "lost_after_s": "heartbeat_timeout_s",
    "machine_name": "host_name",
    "make_room": "evict",
    "masters_to_model": "copy_masters_to_model",
    "match_parameters": "target_params",
    "max_skipped": "max_consecutive_skips",
    "mistaken": "other_kind",
    "modes_path": "lev_backend",
    "name_of": "figure_name",
    "newest_whole": "latest_valid",
    "occupied": "lock_run_dir",
    "padded_size": "padded_count",
    "parse_wish": "parse_profile",
    "patience_s": "grace_period_s",
    "pictures_of": "draw_figures",
    "plan_study": "plan_experiment",
    "reading_of": "record_schema",
    "reference_rows": "reference_vectors",
    "rehearse": "check_space",
    "replacing": "replaced_atomically",
    "resumed_start": "resume_point_of",
    "row_numbers": "sample_numbers",
    "rows_of_argument": "vectors_of_argument",
    "rows_per_shard": "samples_per_shard",
    "rows_text": "samples_text",
    "run_study": "run_experiment",
    "save_group": "checkpoint_process_group",
    "save_slices": "save_shards",
    "scaling_picture": "scaling_figure",
    "set_aside": "quarantine",
    "share_cores": "limit_threads",
    "short_number": "format_tick",
    "show_rows": "show_samples",
    "size_text": "format_bytes",
    "sole_writer": "lock_for_writing",
    "spike_deviations": "spike_threshold_mads",
    "split_folders": "split_dirs",
    "study_app": "experiment_app",
    "take_slice": "read_slice",
    "tp_plan": "tp_layout",
    "unfit": "unsupported_reason",
    "voided": "without_unsupported_errors",
    "weight_slices": "weight_shards",
    "what_to_do": "advice",
    "whole_checkpoint": "resolve_valid",
    "whole_model": "full_model",
    "writer_of_slice": "lock_for_slice",
}
# British spelling → American spelling; matched at the beginning of a word.
BRITISH = {
    r"(?:de)?tokenis(?=e|i|a)": "tokeniz",
    r"materialis": "materializ",
    r"(?:re)?initialis": "initializ",
    r"normalis": "normaliz",
    r"optimis": "optimiz",
    r"recognis": "recogniz",
    r"summaris": "summariz",
    r"(?:de)?serialis": "serializ",
    r"(?:un)?organis": "organiz",
    r"generalis": "generaliz",
    r"parametris": "parametriz",
    r"quantis": "quantiz",
    r"synchronis": "synchroniz",
    r"minimis(?=e|i)": "minimiz",
    r"maximis(?=e|i)": "maximiz",
    r"randomis": "randomiz",
    r"factoris": "factoriz",
    r"penalis": "penaliz",
    r"standardis": "standardiz",
    r"analys(?=e\b|ed|ing)": "analyz",
    r"colour": "color",
    r"behaviour": "behavior",
    r"neighbour": "neighbor",
    r"favour": "favor",
    r"honour": "honor",
    r"centre": "center",
    r"grey\b": "gray",
    r"licence\b": "license",
    r"labell": "label",
    r"modell": "model",
    r"cancell(?=ed|ing)": "cancel",
    r"artefact": "artifact",
    r"catalogue": "catalog",
}
# Phrases of a private language → what to write.
PHRASES = {
    r"data sets?\b": "dataset",
    r"file systems?\b": "filesystem",
    r"goes on\b|go on\b|going on\b|gone on\b": "continue, resume",
    r"anew\b": "again, from step 0",
    r"shall\b": "must, will",
    r"mend(?:s|ed|ing)?\b": "fix, correct",
    r"amber\b": "warning",
    r"(?:is|are|as) meant\b": "intended",
    r"newest whole\b": "latest",
    r"whole checkpoints?\b": "valid checkpoint",
    r"nobody\b": "no rank, no process",
    r"has the word\b": "prints",
    r"at hand\b": "available",
    r"for ever\b": "forever",
    r"a circle\b": "a cycle",
    r"by and by\b": "gradually",
    r"none the worse\b": "unchanged",
    r"what is wrong\b": "the problem",
    r"our fault\b": "internal error",
    r"to the last bit\b": "bitwise",
    r"said\b|told\b": "reported, configured",
    r"lies? (?:in|on|at|beside|below|within)\b": "is in",
    r"damaged\b": "corrupt",
    r"stands? (?:on|in|there|for what)\b": "is in",
    r"is no (?:valid|number|token|folder|file|such)\b": "is not a",
    r"left out\b|leaves? out\b|leaving out\b": "excluded, skipped",
}
# This list, and the tests that judge every change and are not edited.
EXCLUDED = (
    "tests/unit/test_language.py",
    "tests/distributed/test_resume.py",
    "tests/distributed/test_faults.py",
)
# (path, matched text in lower case): why it is right there.
EXCEPTIONS: dict[tuple[str, str], str] = {}


def _files() -> list[Path]:
    files = []
    for place in PLACES:
        path = REPOSITORY / place
        files += [path] if path.is_file() else sorted(path.rglob("*"))
    excluded = {REPOSITORY / name for name in EXCLUDED}
    return [f for f in files if f.is_file() and f.suffix in SUFFIXES and f not in excluded]


def _matches(
    patterns: dict[str, str], before: str, flags: re.RegexFlag | int = re.IGNORECASE
) -> list[str]:
    """`path:line: found → expected` of every match."""
    every = {re.compile(before + f"(?:{p})", flags): word for p, word in patterns.items()}
    lines = []
    for file in _files():
        name = file.relative_to(REPOSITORY).as_posix()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for pattern, word in every.items():
                for match in pattern.finditer(line):
                    if (name, match[0].lower()) not in EXCEPTIONS:
                        lines.append(f"{name}:{number}: {match[0]!r} → {word}: {line.strip()}")
    return lines


def test_replaced_names_do_not_return() -> None:
    names = {f"{re.escape(old)}(?![A-Za-z0-9_])": new for old, new in REPLACED.items()}
    lines = _matches(names, r"(?<![A-Za-z0-9_])", flags=0)
    assert not lines, "\n".join(lines)


def test_spelling_is_american() -> None:
    lines = _matches(BRITISH, r"(?<![A-Za-z])")
    assert not lines, "\n".join(lines)


def test_phrases_are_standard() -> None:
    lines = _matches(PHRASES, r"(?<![A-Za-z_`.])")
    assert not lines, "\n".join(lines)
