"""Rules as data: the correspondence of a file's tensors and a tree's leaves.

A rule may permute and reshape (by its layout), split, concatenate and stack, and
values may be cast. There is no arithmetic, so every rule is invertible and, without
a cast, bit-exact.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from bridge._box import Box, Range, whole
from bridge.rules._layout import Layout, Sizes
from bridge.rules._piece import Piece

RuleSizes = Mapping[str, int | Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Correspondence of one or more tensors of a file and one or more leaves.

    `{layer}` in a source name stands for 0, 1, ..., or the range given in `sizes`, and
    becomes the leading dim of the destination; with two such names, the first is the
    outer dim.

    ```python
    Rule("wte.weight", "embed_tokens.embedding", "vocab embed -> vocab embed")
    Rule("h.{layer}.o.weight", "layers.o.kernel", "embed mlp -> mlp embed")
    # One tensor split along its dim 0:
    Rule("qkv.weight", ("q.kernel", "k.kernel"), ("q e -> e q", "k e -> e k"))
    # Two tensors concatenated along the destination's dim 1:
    Rule(("gate.weight", "up.weight"), "gate_up.kernel", "mlp e -> e mlp", dim=1)
    # One tensor that holds the rows of q, then of k, for each head in turn:
    rows = "(heads d) e -> e heads d"
    Rule("qk.weight", ("q.kernel", "k.kernel"), (rows, rows), repeat="heads")
    ```

    Args:
      source: Name of the tensor, or names of several to be concatenated.
      destination: Path of the leaf, or paths of several to split one tensor into.
      layout: Pattern from source to destination: one for all parts, or one per part;
        None where no dim moves, in rules for `from_torch` and `to_torch`.
      dim: Dim of the source along which a tensor is split, or dim of the destination
        along which several are concatenated (stacked dims not counted).
      repeat: Leading factor of that dim of the source, for each position of which the
        parts of a split tensor come again; None if each part is one range.
      integers: Integer dtype of a table in the file, which the leaf holds as floating
        point numbers, such as "int64"; None for weights.

    Raises:
      ValueError: If sources, destinations, layouts and `dim` are inconsistent.

    Examples:
      >>> rule = bridge.Rule("head.weight", "head.kernel", "out in -> in out")
      >>> state = {"head.weight": np.ones((4, 3), np.float32)}
      >>> tree = {"head": {"kernel": jax.ShapeDtypeStruct((3, 4), jnp.float32)}}
      >>> bridge.from_torch(state, tree, [rule])["head"]["kernel"].shape
      (3, 4)
    """

    source: str | tuple[str, ...]
    destination: str | tuple[str, ...]
    layout: str | tuple[str, ...] | None = None
    dim: int = 0
    repeat: str | None = None
    integers: str | None = None

    def __post_init__(self):
        """Validates what does not depend on sizes."""
        if self.layout is None:
            return
        sources, destinations, layouts = self.sources, self.destinations, self.layouts
        many = max(len(sources), len(destinations))
        wrong = []
        if min(len(sources), len(destinations)) != 1:
            counts = f"{len(sources)} sources and {len(destinations)} destinations"
            wrong.append(f"{counts}, of which one must be 1")
        if _twice(sources) or _twice(destinations):
            wrong.append(f"named twice: {_twice(sources) + _twice(destinations)}")
        if len(layouts) != many:
            wrong.append(f"{len(layouts)} layouts for {many} parts")
        if not all(0 <= self.dim < self._num_dims(layout) for layout in layouts):
            wrong.append(f"dim {self.dim} is not a dim of every part")
        if self.repeat is not None and not all(map(self._repeats, layouts)):
            wrong.append(
                f"{self.repeat} does not lead dim {self.dim} of the source, and a dim "
                "of the destination, of every part of a split tensor"
            )
        if len({_captures(source) for source in sources}) != 1:
            wrong.append("the sources do not hold the same {names}")
        if wrong:
            raise ValueError(f"{self}: {'; '.join(wrong)}.")

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return _as_tuple(self.source)

    @property
    def destinations(self) -> tuple[str, ...]:
        """Paths of the leaves."""
        return _as_tuple(self.destination)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Parsed layouts, one per part.

        Raises:
          ValueError: If the rule has none: `unchanged` gives it one.
        """
        if self.layout is None:
            raise ValueError(
                f"The rule of {', '.join(self.destinations)} has no layout: only "
                "from_torch and to_torch read one from shapes. Give it a layout."
            )
        patterns = _as_tuple(self.layout)
        if len(patterns) == 1:
            patterns *= max(len(self.sources), len(self.destinations))
        return tuple(Layout.parse(pattern) for pattern in patterns)

    def unchanged(self, num_dims: int) -> "Rule":
        """Returns the rule with a layout that moves no dim.

        Args:
          num_dims: Number of dims of a tensor.
        """
        dims = " ".join(f"d{dim}" for dim in range(num_dims))
        return dataclasses.replace(self, layout=f"{dims} -> {dims}")

    @property
    def dims(self) -> set[str]:
        """Names of all dims whose sizes the rule needs."""
        sides = [layout.source for layout in self.layouts]
        return {name for side in sides for dim in side for name in dim} | set(
            _captures(self.sources[0])
        )

    def pieces(self, sizes: RuleSizes) -> Iterator[Piece]:
        """Yields the pieces of the rule, one per tensor section.

        Args:
          sizes: Size of each dim that the layouts name; for each `{name}`, its size or
            its numbers.
        """
        names = _captures(self.sources[0])
        numbers = [_numbers(sizes[name]) for name in names]
        stacked = tuple(map(len, numbers))
        dims = {name: size for name, size in sizes.items() if isinstance(size, int)}
        for position in itertools.product(*map(range, stacked)):
            where = {
                name: values[i]
                for name, values, i in zip(names, numbers, position, strict=True)
            }
            origin = tuple(Range(i, i + 1) for i in position)
            yield from self._parts(where, stacked, origin, dims)

    def _parts(
        self, where: dict[str, int], stacked: tuple[int, ...], origin: Box, sizes: Sizes
    ) -> Iterator[Piece]:
        times = 1
        if self.repeat is not None:
            times, sizes = sizes[self.repeat], {**sizes, self.repeat: 1}
        from_boxes, from_shape = self._place(
            [layout.source_shape(sizes) for layout in self.layouts], self.destinations
        )
        to_boxes, to_shape = self._place(
            [layout.destination_shape(sizes) for layout in self.layouts], self.sources
        )
        for number, part in itertools.product(range(times), range(len(self.layouts))):
            layout = self.layouts[part]
            dim = self._repeated_dim(layout)
            full_source, source_box = _nth(
                number, times, from_shape[part], from_boxes[part], self.dim
            )
            full, box = _nth(number, times, to_shape[part], to_boxes[part], dim)
            yield Piece(
                source=self.sources[part % len(self.sources)].format(**where),
                source_shape=full_source,
                source_box=source_box,
                destination=self.destinations[part % len(self.destinations)],
                destination_shape=stacked + full,
                destination_box=origin + box,
                layout=layout,
                sizes=sizes,
                integers=self.integers,
            )

    def _repeats(self, layout: Layout) -> bool:
        leads = [names[:1] == (self.repeat,) for names in layout.source]
        return (
            len(self.destinations) > 1
            and self.dim < len(leads)
            and leads[self.dim]
            and (self.repeat,) in [names[:1] for names in layout.destination]
        )

    def _repeated_dim(self, layout: Layout) -> int:
        """Returns the dim of the destination that `repeat` leads; 0 without one."""
        if self.repeat is None:
            return 0
        return [names[:1] for names in layout.destination].index((self.repeat,))

    def _place(
        self, shapes: list[tuple[int, ...]], other_side: tuple[str, ...]
    ) -> tuple[list[Box], list[tuple[int, ...]]]:
        """Returns box and full shape of each part on one side of the rule.

        If the other side has several names, this side has one: its parts are
        consecutive ranges along `dim`.
        """
        if len(other_side) == 1:
            return [whole(shape) for shape in shapes], shapes
        if len({shape[: self.dim] + shape[self.dim + 1 :] for shape in shapes}) > 1:
            raise ValueError(
                f"{self}: parts of shapes {shapes} cannot be laid end to end; its "
                f"parts differ in another dim than {self.dim}."
            )
        boxes, end = [], 0
        for shape in shapes:
            box = list(whole(shape))
            box[self.dim] = Range(end, end := end + shape[self.dim])
            boxes.append(tuple(box))
        total = (*shapes[0][: self.dim], end, *shapes[0][self.dim + 1 :])
        return boxes, [total] * len(shapes)

    def _num_dims(self, layout: Layout) -> int:
        if len(self.destinations) > 1:
            return len(layout.source)
        # A rule of one part neither splits nor concatenates: `dim` is unused.
        return len(layout.destination) if len(self.sources) > 1 else self.dim + 1


def _nth(
    number: int, times: int, shape: tuple[int, ...], box: Box, dim: int
) -> tuple[tuple[int, ...], Box]:
    """Returns shape and box of a section that comes `times` times along a dim."""
    if times == 1:
        return shape, box
    first = number * shape[dim]
    moved = Range(first + box[dim].start, first + box[dim].stop)
    full = (*shape[:dim], times * shape[dim], *shape[dim + 1 :])
    return full, (*box[:dim], moved, *box[dim + 1 :])


def _as_tuple(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _numbers(size: int | Sequence[int]) -> Sequence[int]:
    return range(size) if isinstance(size, int) else size


def _twice(names: tuple[str, ...]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _captures(pattern: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\{(\w+)\}", pattern))
