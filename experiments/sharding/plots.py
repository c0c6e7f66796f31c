"""Bar charts as SVG, with nothing but the standard library."""

from xml.sax.saxutils import escape

COLORS = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999"]
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 860, 420, 80, 50, 60, 170


def _nice(top):
    """A round number not below `top`, and its step."""
    step = 10 ** (len(str(int(max(top, 1)))) - 1)
    while top / step < 4:
        step /= 2
    count = int(-(-top // step))
    return step * count, step


def _frame(title, unit, top, names):
    limit, step = _nice(top)
    y = lambda v: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * v / limit
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
             f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>', f'<text x="{LEFT - 60}" y="{TOP - 8}">{escape(unit)}</text>']
    value = 0
    while value <= limit + step / 2:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,g}</text>')
        value += step
    for i, name in enumerate(names):
        parts.append(f'<rect x="{WIDTH - RIGHT + 12}" y="{TOP + 20 * i}" width="12" height="12" fill="{COLORS[i % len(COLORS)]}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 30}" y="{TOP + 20 * i + 11}">{escape(name)}</text>')
    return parts, y


def _label(parts, x, text):
    parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(text)}</text>')


def _bar(parts, x, width, y0, y1, color, what):
    parts.append(f'<rect x="{x:.1f}" y="{y1:.1f}" width="{width:.1f}" height="{max(0, y0 - y1):.1f}" fill="{color}"><title>{escape(what)}</title></rect>')


def grouped_bars(path, title, labels, series, unit):
    """series: name -> one value (or None) a label."""
    top = max(v for values in series.values() for v in values if v is not None)
    parts, y = _frame(title, unit, top, list(series))
    group = (WIDTH - LEFT - RIGHT) / len(labels)
    bar = 0.8 * group / len(series)
    for g, label in enumerate(labels):
        for s, (name, values) in enumerate(series.items()):
            if values[g] is not None:
                _bar(parts, LEFT + group * (g + 0.1) + bar * s, bar * 0.92, y(0), y(values[g]), COLORS[s % len(COLORS)], f"{name}, {label}: {values[g]:,.0f}")
        _label(parts, LEFT + group * (g + 0.5), label)
    path.write_text("\n".join(parts + ["</svg>"]) + "\n")


def stacked_bars(path, title, labels, series, unit):
    """series: name -> one value a label, put on top of each other."""
    top = max(sum(values[i] for values in series.values()) for i in range(len(labels)))
    parts, y = _frame(title, unit, top, list(series))
    group = (WIDTH - LEFT - RIGHT) / len(labels)
    for g, label in enumerate(labels):
        at = 0
        for s, (name, values) in enumerate(series.items()):
            _bar(parts, LEFT + group * (g + 0.2), group * 0.6, y(at), y(at + values[g]), COLORS[s % len(COLORS)], f"{name}, {label}: {values[g]:,.2f} {unit}")
            at += values[g]
        _label(parts, LEFT + group * (g + 0.5), label)
    path.write_text("\n".join(parts + ["</svg>"]) + "\n")
