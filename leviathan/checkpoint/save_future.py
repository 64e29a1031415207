"""A save that may continue while training does."""

import threading
from collections.abc import Callable


class SaveFuture:
    """Work that began when this was made, in a thread of its own or on the spot.

    The thread dies with the process: what it has not finished is a draft that the next start
    clears away.

    Args:
        work: what to do; for all ranks the same, as it may communicate.
        background: whether to return before it is done.
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
        """True as soon as the work has ended in an error, which `wait` raises."""
        return self._error is not None

    def wait(self) -> None:
        """Returns when everything is written; raises what the writing raised."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
