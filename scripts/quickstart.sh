#!/usr/bin/env bash
# Trains Leviathan and its tied baseline on a small corpus on two CPU ranks, compares and exports
# them. Prints every command before it runs it. If it is interrupted, run it again to resume.
#
#   scripts/quickstart.sh [key=value ...]
#
# The arguments override configs/run/quickstart.yaml. `leviathan` and `python` must be on PATH
# (`make quickstart` takes them from .venv). Environment variables:
#
#   OUT           output directory (quickstart)
#   SHARDS        your own text: paths or patterns of .jsonl, .jsonl.zst or .jsonl.gz files
#   CORPUS_BYTES  bytes of the generated corpus (the complete standard library)
#   VOCAB_SIZE    tokenizer entries (8192)
#   STEPS         training steps (120)
set -euo pipefail

OUT=${OUT:-quickstart}
SHARDS=${SHARDS:-}
CORPUS_BYTES=${CORPUS_BYTES:-}
VOCAB_SIZE=${VOCAB_SIZE:-8192}
STEPS=${STEPS:-120}

root=$(realpath --relative-to=. "$(dirname "$0")/..")
overrides=("$@")
launcher=  # process id of the training in progress
tied=$OUT/runs/tied leviathan=$OUT/runs/leviathan
# Without a GPU, DeepSpeed otherwise warns in every process that it uses the CPU.
[ -e /dev/nvidiactl ] || export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}

bold() { if [ -t 2 ]; then printf '\033[1m%s\033[0m\n' "$*" >&2; else printf '%s\n' "$*" >&2; fi; }
step() { bold "── $1/8 ── $2"; }
run() { bold "$ ${*@Q}"; "$@"; }

# run_unless_exists FILE COMMAND...
run_unless_exists() {
  if [ -e "$1" ]; then echo "$1 exists" >&2; else run "${@:2}"; fi
}

on_signal() {
  trap '' INT TERM
  if [ -n "$launcher" ]; then
    echo "Interrupted. The ranks save a checkpoint and exit." >&2
    kill -TERM "$launcher" 2>/dev/null && wait "$launcher" || true
  fi
  exit "$1"
}
on_exit() {
  case $1 in
    0) ;;
    130 | 143) echo "Interrupted. Run the same command to resume." >&2 ;;
    *) echo "The last command exited with status $1. Correct the cause and run the same command to resume." >&2 ;;
  esac
}
trap 'on_signal 130' INT
trap 'on_signal 143' TERM
trap 'on_exit $?' EXIT

checkpoint_dir() { printf '%s/checkpoints/step-%08d' "$1" "$STEPS"; }
# train RUN_DIR KIND: trains on two ranks unless the run is complete.
train() {
  if [ -e "$(checkpoint_dir "$1")/manifest.json" ]; then
    echo "$1 exists and is complete at step $STEPS" >&2
    return
  fi
  local command=(leviathan launch "$root/configs/run/quickstart.yaml" --ranks 2 "run_dir=$1"
    "data.path=$OUT/data" "${overrides[@]}" "model.embedding.kind=$2" "train.steps=$STEPS")
  bold "$ ${command[*]@Q}"
  set -m # a process group of its own, so that Ctrl-C reaches this script, which stops the launcher
  "${command[@]}" &
  launcher=$!
  set +m
  wait "$launcher"
  launcher=
}

step 1 "Write the corpus"
run python "$root/data_prep/stdlib_corpus.py" --out "$OUT/corpus" ${CORPUS_BYTES:+--max-bytes "$CORPUS_BYTES"}
shards=${SHARDS:-$OUT/corpus/train-*.jsonl.zst}

step 2 "Train the tokenizer: byte-level BPE"
# $shards is not quoted: the shell expands its patterns.
run_unless_exists "$OUT/tokenizer.meta.json" \
  leviathan tokenizer train $shards --vocab-size "$VOCAB_SIZE" --out "$OUT/tokenizer.tiktoken"

step 3 "Prepare the dataset"
data=("tokenizer=$OUT/tokenizer.tiktoken" "out=$OUT/data")
if [ -n "$SHARDS" ]; then # there is no held-out shard: use a fraction of the documents
  set -f
  data+=("source.paths=[$(printf '"%s",' $SHARDS)]" "validation.paths=[]" validation.fraction=0.02)
  set +f
else
  data+=("source.paths=$shards" "validation.paths=$OUT/corpus/heldout.jsonl.zst")
fi
run leviathan prep "$root/configs/data/quickstart.yaml" "${data[@]}"

step 4 "Train the tied baseline"
train "$tied" tied

step 5 "Train Leviathan"
train "$leviathan" leviathan

step 6 "Evaluate both models"
for run_dir in "$tied" "$leviathan"; do
  results=$run_dir/evaluation/$(basename "$(checkpoint_dir "$run_dir")")
  run_unless_exists "$results/perplexity.json" leviathan perplexity "$run_dir" "$OUT/data"
  run_unless_exists "$results/lm_eval.json" \
    leviathan eval "$run_dir" --tasks next_line --task-data "$OUT/corpus"
done
# $results is the last model's: the command writes the results of all models at once.
run_unless_exists "$results/frequency.json" leviathan frequency "$tied" "$leviathan" --data "$OUT/data"

step 7 "Export Leviathan to a Llama directory and load it with transformers"
run_unless_exists "$OUT/export/export.json" leviathan export "$leviathan" "$OUT/export" --verify

step 8 "Write the report"
run leviathan report "$tied" "$leviathan" --out "$OUT/report"

bold "Report: $(realpath "$OUT/report/report.html")"
echo "A run of this size verifies the pipeline. It does not show which model is better: that takes
billions of tokens (README, 'Train and compare at full scale')." >&2
