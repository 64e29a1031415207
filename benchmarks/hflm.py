"""lm-eval's Hugging Face model, the reference of two benchmarks."""

from pathlib import Path
from typing import Any

from lm_eval.models.huggingface import HFLM


def hugging_face_model(folder: Path, device: str, batch_size: int, **options: Any) -> Any:
    """Loads lm-eval's model from an exported directory; `options` as in `--model_args`."""
    arguments = {"pretrained": str(folder), **options}
    return HFLM.create_from_arg_obj(arguments, {"device": device, "batch_size": batch_size})
