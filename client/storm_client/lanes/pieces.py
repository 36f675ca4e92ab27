"""Which pieces of reserved address ranges the daemon has mapped.

PyTorch's expandable segments are such ranges. Both sides reserve a range, and each piece is mapped
at the same offset of it. So a tensor that spans several pieces is contiguous for the daemon, too.
PyTorch unmaps pieces when its cache is emptied or memory runs out, and may map others at the same
addresses. So each known piece is retained here: until it is released, no other piece has its
handle. Each time that a tensor in a piece is looked for, the driver is asked whether the piece is
still mapped.
"""

from __future__ import annotations

import logging
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from storm_kernels.errors import CudaDriverError

from storm_client.lanes import Mapped
from storm_client.lanes.offers import Driver, Offered, State
from stormd.protocol import MapPiece, ReserveRange

__all__ = ["AddressRange", "Piece", "Pieces"]

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class AddressRange(Offered):
    """`nbytes` of addresses from `begin` on, reserved at once."""

    begin: int
    nbytes: int

    def offer(self) -> ReserveRange:
        """Return the message that makes the daemon reserve a range of this size."""
        return ReserveRange(segment=self.number, nbytes=self.nbytes)


@dataclass(slots=True, eq=False)
class Piece(Offered):
    """`nbytes` of memory, mapped at `begin` in a range; its `handle` is retained."""

    begin: int
    nbytes: int
    handle: int
    range: AddressRange

    @property
    def end(self) -> int:
        """The address after the piece's last byte."""
        return self.begin + self.nbytes

    def offer(self) -> MapPiece:
        """Return the message that makes the daemon map the piece."""
        return MapPiece(
            segment=self.number,
            into=self.range.number,
            offset=self.begin - self.range.begin,
            nbytes=self.nbytes,
        )


class Pieces:
    """The known pieces, by address. `offer` is called for new ones, `forget` for freed ones."""

    def __init__(
        self,
        driver: Driver,
        *,
        new_number: Callable[[], int],
        offer: Callable[[AddressRange | Piece], None],
        forget: Callable[[AddressRange | Piece], None],
    ) -> None:
        self._driver = driver
        self._new_number = new_number
        self._offer = offer
        self._forget = forget
        self._ranges: dict[tuple[int, int], AddressRange] = {}  # by first address and bytes
        self._begins: list[int] = []
        self._known: dict[int, Piece] = {}  # by first address
        self._is_closed = False

    def find(self, address: int, nbytes: int) -> Mapped | None:
        """Return where the daemon has mapped these bytes, else None; offer new pieces."""
        end, reached, is_mapped = address + nbytes, address, True
        piece = None
        while reached < end:
            before, piece = piece, self._at(reached) or self._add(reached)
            if piece is None or (before is not None and before.range is not piece.range):
                return None
            is_mapped = is_mapped and piece.state is State.MAPPED
            reached = piece.end
        if piece is None or not is_mapped:
            return None
        return Mapped(piece.range.number, address - piece.range.begin)

    def has(self, address: int) -> bool:
        """Return whether a piece is known at an address; PyTorch may have unmapped the piece."""
        return self._covering(address) is not None

    def sweep(self) -> bool:
        """Forget freed pieces and empty ranges; return whether the daemon had mapped a piece."""
        dead = [one for one in self._known.values() if not self._is_mapped(one)]
        was_mapped = [self._drop(one) for one in dead]
        used = {one.range for one in self._known.values()}
        for key, one in list(self._ranges.items()):
            if one not in used and one.state is not State.OFFERED:
                del self._ranges[key]
                self._forget(one)
        return any(was_mapped)

    def within(self, address: int, nbytes: int) -> Iterator[Piece]:
        """Yield the known pieces that cover the bytes from `address` on, up to the first gap."""
        reached, end = address, address + nbytes
        while reached < end and (piece := self._covering(reached)) is not None:
            yield piece
            reached = piece.end

    def close(self) -> None:
        """Forget all pieces without calling `forget`: there is no daemon any more."""
        self._is_closed = True
        while self._known:
            _, piece = self._known.popitem()
            piece.known = False
            with suppress(CudaDriverError):  # a broken device has nothing left to release
                self._driver.release_piece(piece.handle)
        self._begins.clear()
        self._ranges.clear()

    def offered(self) -> Iterator[AddressRange | Piece]:
        """Yield all that a daemon has mapped or is to map and that still exists, ranges first."""
        yield from (one for one in self._ranges.values() if one.state is not State.REFUSED)
        for piece in self._known.values():
            if piece.state is not State.REFUSED and self._is_mapped(piece):
                yield piece

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[AddressRange | Piece]:
        """Iterate over all known ranges, then all known pieces."""
        yield from self._ranges.values()
        yield from self._known.values()

    # --- helpers ----------------------------------------------------------------------------

    def _at(self, address: int) -> Piece | None:
        """Return the known piece that is mapped at an address; forget one that is not any more."""
        piece = self._covering(address)
        if piece is None or self._is_mapped(piece):
            return piece
        self._drop(piece)
        return None

    def _covering(self, address: int) -> Piece | None:
        index = bisect_right(self._begins, address) - 1
        if index < 0:
            return None
        piece = self._known[self._begins[index]]
        return piece if address < piece.end else None

    def _is_mapped(self, piece: Piece) -> bool:
        return self._driver.holds(piece.begin, piece.handle)

    def _add(self, address: int) -> Piece | None:
        """Note and offer the piece that is mapped at an address; return None if there is none."""
        handle = None if self._is_closed else self._driver.retain_piece(address)
        if handle is None:
            return None
        try:
            begin, nbytes = self._driver.allocation(address)
            first, reserved = self._driver.reserved_range(address)
            is_piece = self._driver.holds(begin, handle)
        except CudaDriverError as error:
            log.info("memory at %#x stays unmapped: %s", address, error)
            is_piece = False
        if not is_piece or begin < first or begin + nbytes > first + reserved:
            self._driver.release_piece(handle)
            return None
        self._forget_overlapping(begin, begin + nbytes)
        into = self._range(first, reserved)
        piece = Piece(self._new_number(), State.OFFERED, begin, nbytes, handle, into)
        insort(self._begins, begin)
        self._known[begin] = piece
        self._offer(piece)
        return piece

    def _range(self, begin: int, nbytes: int) -> AddressRange:
        """Return a range; a new range is offered."""
        known = self._ranges.get((begin, nbytes))
        if known is None:
            known = AddressRange(self._new_number(), State.OFFERED, begin, nbytes)
            self._ranges[begin, nbytes] = known
            self._offer(known)
        return known

    def _forget_overlapping(self, begin: int, end: int) -> None:
        """Forget the pieces in the address range of a new piece."""
        index = max(0, bisect_right(self._begins, begin) - 1)
        while index < len(self._begins) and self._begins[index] < end:
            piece = self._known[self._begins[index]]
            if piece.end > begin:
                self._drop(piece)
            else:
                index += 1

    def _drop(self, piece: Piece) -> bool:
        """Forget a piece; return whether the daemon had mapped it."""
        del self._known[piece.begin]
        self._begins.remove(piece.begin)
        self._driver.release_piece(piece.handle)
        self._forget(piece)
        return piece.state is State.MAPPED
