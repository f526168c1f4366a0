"use strict";
// Markdown of summaries and model cards as elements. The text is data: what this does not know stays text, HTML too.

/** Elements of a Markdown text: headings, paragraphs, lists, tables, code blocks. */
function written(text) {
  const lines = text.replace(/^---\n[^]*?\n---\n/, "").split("\n"), made = [];
  for (let i = 0; i < lines.length;) {
    const kind = lineKind(lines[i]), block = [];
    if (kind === "fence") {
      for (i += 1; i < lines.length && lineKind(lines[i]) !== "fence"; i++) block.push(lines[i]);
      i += 1;
    } else if (kind === "heading") block.push(lines[i++]);
    else {
      for (; i < lines.length && lineKind(lines[i], kind) === kind; i++) block.push(lines[i]);
    }
    if (kind) made.push(BLOCKS[kind](block));
  }
  return made;
}

/** What a line begins or continues; a line below an item of a list belongs to it if it is indented. */
function lineKind(line, before = "") {
  if (line.startsWith("```")) return "fence";
  if (!line.trim()) return "";
  if (/^#{1,6} /.test(line)) return "heading";
  if (line.startsWith("|")) return "table";
  if (/^[-*] /.test(line) || (before === "list" && /^\s/.test(line))) return "list";
  return "paragraph";
}

const BLOCKS = {
  fence: (lines) => make("pre", {}, lines.join("\n")),
  heading: ([line]) => make("h5", {}, ...inline(line.replace(/^#+ /, ""))),
  paragraph: (lines) => make("p", {}, ...inline(lines.join(" "))),
  list: (lines) => {
    const items = [];
    for (const line of lines) {
      if (/^[-*] /.test(line)) items.push(line.slice(2));
      else items[items.length - 1] += ` ${line.trim()}`;
    }
    return make("ul", {}, ...items.map((item) => make("li", {}, ...inline(item))));
  },
  table: (lines) => {
    const cells = (one) => one.replace(/^\||\|\s*$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
    const [head, ...rows] = lines.filter((one) => !/^[|\s:-]+$/.test(one)).map(cells);
    const row = (texts) => make("tr", {}, ...texts.map((text) => make("td", {}, ...inline(text))));
    const titles = (head || []).map((text) => make("th", { scope: "col" }, ...inline(text)));
    return scrolling("Table", titles, rows.map(row), { class: "written" }, false);
  },
};

/** Text with `code`, **bold** and *italics* as elements; a link is its text, because this page leads nowhere. */
function inline(text) {
  const parts = text.replace(/\[([^\]]+)\]\([^)]*\)/g, "$1").split(/(`[^`]+`|\*\*[^*]+\*\*|\*[^*]+\*)/);
  const tags = [["`", "code"], ["**", "strong"], ["*", "em"]];
  return parts.filter(Boolean).map((part) => {
    const within = ([mark]) => part.length > 2 * mark.length && part.startsWith(mark) && part.endsWith(mark);
    const [mark, tag] = tags.find(within) || [];
    return tag ? make(tag, {}, unescaped(part.slice(mark.length, -mark.length))) : unescaped(part);
  });
}

/** What Markdown writes with a backslash or as an HTML entity, as plain letters. */
function unescaped(text) {
  const entities = { "&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"' };
  return text.replace(/\\([\\`*_|<>&])/g, "$1").replace(/&(lt|gt|amp|quot);/g, (one) => entities[one]);
}
