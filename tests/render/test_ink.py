"""Figures on the page: colors follow the theme, text stays text, ids do not collide."""

from __future__ import annotations

import re

from casewise.render.ink import HARM, canvas, inked, page_svg, svg_text, write_png


def figure_with(text: str):
    with inked():
        figure, axes = canvas()
        axes[0, 0].plot([0, 1], [0, 1], color=HARM, marker="o")
        axes[0, 0].set_title(text)
    return figure


def test_colors_become_variables_of_the_page():
    drawn = page_svg(svg_text(figure_with("HA"), id="one"), title="HA")
    assert "var(--harm)" in drawn
    assert "var(--ink)" in drawn
    assert not re.search(r"#[0-9a-f]{6}", drawn)


def test_numbers_in_the_text_of_a_figure_are_not_shortened():
    drawn = page_svg(svg_text(figure_with("0.12345"), id="one"), title="x")
    assert ">0.12345<" in drawn


def test_text_is_escaped():
    drawn = page_svg(svg_text(figure_with("<script>"), id="one"), title='"><script>')
    assert "<script" not in drawn


def test_ids_of_two_figures_differ():
    ids = [set(re.findall(r'id="([^"]+)"', svg_text(figure_with("x"), id=id))) for id in ("one", "two")]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_a_figure_is_drawn_the_same_twice():
    assert svg_text(figure_with("x"), id="one") == svg_text(figure_with("x"), id="one")


def test_a_png_has_a_white_background(tmp_path):
    from PIL import Image

    write_png(tmp_path / "x.png", figure_with("x"))
    with Image.open(tmp_path / "x.png") as image:
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
