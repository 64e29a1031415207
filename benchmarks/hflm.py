"""lm-eval's own Hugging Face model, which the other side of two benchmarks is."""

from pathlib import Path
from typing import Any

from lm_eval.models.huggingface import HFLM


def hugging_face_model(folder: Path, device: str, batch_size: int, **options: Any) -> Any:
    """lm-eval's model of an exported folder; `options` as after `--model_args`."""
    arguments = {"pretrained": str(folder), **options}
    return HFLM.create_from_arg_obj(arguments, {"device": device, "batch_size": batch_size})
