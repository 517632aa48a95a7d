"""The page's own style and script: widths for a laptop, and stretching of the time axis."""

STYLE = """
*{box-sizing:border-box} body{font:13px/1.4 system-ui,sans-serif;margin:0;color:#212529;background:#fff}
header{padding:10px 18px 8px;border-bottom:1px solid #dee2e6;position:sticky;top:0;background:#fff;z-index:2}
header h1{font-size:17px;margin:0 0 2px} header p{margin:0;color:#495057}
nav{float:right} nav a{margin-left:14px;color:#1971c2;text-decoration:none}
main{padding:0 18px 40px;max-width:1600px;margin:auto} section{scroll-margin-top:64px}
h2{font-size:15px;margin:16px 0 6px} .faint{color:#868e96} svg text{font-size:12px;fill:currentColor}
.numbers{display:grid;grid-template-columns:repeat(7,1fr);gap:8px;margin:10px 0 0}
.numbers div{border:1px solid #dee2e6;border-radius:6px;padding:5px 10px} .numbers b{font-size:17px;display:block}
.numbers .bad{background:#ffe3e3;border-color:#fa5252} .numbers .good{background:#ebfbee;border-color:#51cf66}
.frame{display:flex} .names{width:118px;flex:none;font-size:12px;padding-right:8px;text-align:right;line-height:30px}
.window{overflow-x:auto;flex:1;min-width:0} .stretch{width:100%} .window svg{display:block}
.tick{position:absolute;right:8px;line-height:14px;transform:translateY(-2px)}
.tick:last-child{transform:translateY(-14px)}
.legend{margin:4px 0 8px 118px;color:#495057} .legend span{margin-right:14px;white-space:nowrap}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px;vertical-align:-1px}
.zoom{float:right;font-size:12px} .zoom button{font:inherit;margin-left:4px;padding:1px 9px;cursor:pointer}
.zoom button.on{background:#1971c2;color:#fff;border-color:#1971c2}
table{border-collapse:collapse} th,td{padding:3px 12px 3px 0;text-align:right;border-bottom:1px solid #e9ecef}
th:first-child,td:first-child,td.word,th.word{text-align:left}
.columns{display:flex;gap:48px;flex-wrap:wrap;align-items:flex-start}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(248px,1fr));gap:10px}
.card{border:1px solid #dee2e6;border-radius:6px;padding:8px 10px;min-width:0}
.card .name{font-weight:600;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.picture{height:128px;display:flex;align-items:center}
.ranks{display:flex;flex-wrap:wrap;gap:6px;align-items:center;margin-bottom:12px}
.rank{border:1px solid #74c0fc;background:#e7f5ff;border-radius:5px;padding:3px 9px;min-width:84px}
.scroll{overflow-x:auto} .arrow{fill:none;stroke:#495057;stroke-width:1.3}
.line{display:grid;grid-template-columns:minmax(220px,1.1fr) 2fr 88px 88px 96px 96px;gap:10px;
padding:1px 4px;align-items:center}
.line>span:nth-child(n+3){text-align:right} .line:hover{background:#f1f3f5}
.head{font-weight:600;border-bottom:1px solid #ced4da}
.leaf .name::before{content:"";display:inline-block;width:13px} summary{cursor:pointer;list-style:none}
summary .name::before{content:"\\25B8";display:inline-block;width:13px;color:#868e96}
details[open]>summary .name::before{content:"\\25BE"} .bars{display:flex;height:11px;background:#f8f9fa}
.bars i{display:block}
"""

SCRIPT = """
const windows = [...document.querySelectorAll('.window')];
const buttons = [...document.querySelectorAll('.zoom button')];
let zoom = 1;
function stretch(to, share) {
  zoom = to;
  for (const w of windows) {
    w.firstElementChild.style.width = 100 * zoom + '%';
    if (share !== undefined) w.scrollLeft = share * w.scrollWidth - w.clientWidth / 2;
  }
  for (const b of buttons) b.classList.toggle('on', Number(b.dataset.zoom) === zoom);
}
for (const b of buttons) b.onclick = () => {
  const w = windows[0];
  stretch(Number(b.dataset.zoom), (w.scrollLeft + w.clientWidth / 2) / w.scrollWidth);
};
for (const w of windows) w.onscroll = () => {
  for (const o of windows) if (o.scrollLeft !== w.scrollLeft) o.scrollLeft = w.scrollLeft;
};
stretch(1);
"""
