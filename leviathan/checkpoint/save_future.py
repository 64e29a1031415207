"""A save that may run in the background of training."""

import threading
from collections.abc import Callable


class SaveFuture:
    """Handle of a save that starts on construction, in a background thread or synchronously.

    The thread ends with the process: an unfinished save leaves a staging directory, which the next
    start removes.

    Args:
        work: function to run; the same on all ranks, because it may communicate.
        background: whether to run it in a thread and return immediately.
    """

    def __init__(self, work: Callable[[], None], background: bool) -> None:
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
            self._thread.start()
        else:
            work()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    @property
    def failed(self) -> bool:
        """True once the save has failed; `wait` raises its error."""
        return self._error is not None

    def wait(self) -> None:
        """Blocks until the save is complete, and raises its error if it failed."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
