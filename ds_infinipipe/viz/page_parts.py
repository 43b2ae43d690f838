"""What every page of a plan has: its style, its one script and the ticks of its time axis."""

from __future__ import annotations

import math

__all__ = ["SCRIPT", "STYLE", "TIME_WIDTH_PX", "time_ticks"]

TIME_WIDTH_PX = 1100
"""Width of the time axis that labels are chosen for until the script measures it."""

STYLE = """
body{font:13px sans-serif;margin:16px;color:#222}
h1{font-size:18px}h2{font-size:14px;margin-top:24px}
pre{font-size:12px;overflow-x:auto}
.legend span{margin-right:12px;white-space:nowrap}
.legend i{display:inline-block;width:12px;height:12px;margin-right:4px;vertical-align:-1px}
.legend input{vertical-align:middle;width:160px;margin-right:12px}
.chart{display:flex}
.labels{flex:none;width:110px;overflow:visible}
.scroll{overflow-x:auto;flex:1;min-width:0}
svg text{font:11px sans-serif;fill:#222}
svg text.title{font-weight:bold;font-size:13px}
svg text.small{fill:#666}
svg text.tick{text-anchor:middle;fill:#666}
line.tick{stroke:#666}
line.limit{stroke:#c0392b;stroke-width:1.5}
.span text,.cell text{text-anchor:middle;pointer-events:none}
.span text{paint-order:stroke;stroke:#fff;stroke-width:2px;stroke-opacity:.75}
.span>rect:first-of-type{stroke:#fff;stroke-width:.6}
.span:hover>rect:first-of-type{stroke:#000;stroke-width:2}
.memory{overflow:visible}
.memory rect{shape-rendering:crispEdges}
.memory:hover{opacity:.7}
.cell rect{fill:#54278f}
.cell text.light{fill:#fff}
.hidden{display:none}
"""

SCRIPT = """
const time=document.getElementById("time"),zoom=document.getElementById("zoom");
function show(){
  time.setAttribute("width",100*Math.pow(2,zoom.value)+"%");
  const width=time.getBoundingClientRect().width;
  for(const text of time.querySelectorAll(".span text")){
    const share=parseFloat(text.parentNode.getAttribute("width"))/100;
    text.classList.toggle("hidden",share*width<parseFloat(text.dataset.px));
  }
}
zoom.addEventListener("input",show);window.addEventListener("resize",show);show();
"""

_MOST_TICKS = 12


def time_ticks(end_s: float) -> tuple[float, ...]:
    """Round times after 0 and clearly before the end: 1, 2 or 5 times a power of ten apart."""
    raw = end_s / _MOST_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= raw * (1 - 1e-9))
    ticks = (round(n * step, 12) for n in range(1, int(end_s / step) + 1))
    return tuple(tick for tick in ticks if tick < 0.99 * end_s)
