"""Layouts of weights at random, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from bridge.rules._layout import Layout


@st.composite
def layouts(draw, largest):
    """Any permutation of up to four named dims, grouped at random on both sides.

    Args:
      draw: Function that hypothesis passes.
      largest: Largest size of a dim.
    """
    names = draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4))

    def side(names):
        dims = []
        for name in names:
            if dims and draw(st.booleans()):
                dims[-1] += (name,)
            else:
                dims.append((name,))
        return tuple(dims)

    layout = Layout(side(names), side(draw(st.permutations(names))))
    return layout, {name: draw(st.integers(1, largest)) for name in names}
