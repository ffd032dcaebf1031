// The heat map as a file: SVG and CSV.

const escape = text => text.replace(/[&<>"]/g, found => `&#${found.charCodeAt(0)};`);
const round = value => Number(value.toFixed(2));

/** Return a row for each cell. other: Counts to compare with, or null. */
export function mapToCsv(counts, other) {
  const more = other ? ["tokens_other", "share_other", "difference"] : [];
  const lines = [["layer", "expert", "tokens", "share", ...more]];
  const share = (of, layer, expert) => of.share(layer, expert).toFixed(6);
  for (let layer = 0; layer < counts.layers; layer++) {
    for (let expert = 0; expert < counts.experts; expert++) {
      const used = of => of.values[layer * of.experts + expert];
      const line = [layer, expert, used(counts), share(counts, layer, expert)];
      if (other) {
        const difference = counts.share(layer, expert) - other.share(layer, expert);
        line.push(used(other), share(other, layer, expert), difference.toFixed(6));
      }
      lines.push(line);
    }
  }
  return lines.map(line => line.join(",") + "\n").join("");
}

/** Return the map as SVG. map: a HeatMap that is drawn. texts: lines above it. */
export function mapToSvg(map, texts, paper) {
  const head = 20 * texts.length + 8;
  const {width, height, ink} = map.geometry();
  const parts = texts.map((text, n) => label(8, 20 + 20 * n, text, ink, "start", n ? 12 : 14));
  const shift = `transform="translate(8 ${head})"`;
  const cells = map
    .cells()
    .map(
      ({x, y, w, h, color, title}) =>
        `<rect x="${round(x)}" y="${round(y)}" width="${round(w)}" height="${round(h)}" ` +
        `fill="${color}"><title>${escape(title)}</title></rect>`,
    );
  const labels = map.labels().map(({x, y, text, align}) => label(x, y + 4, text, ink, align, 11));
  const size = `width="${width + 16}" height="${height + head + 8}"`;
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family="system-ui, sans-serif">`,
    `<rect width="100%" height="100%" fill="${paper}"/>`,
    ...parts,
    `<g ${shift}>`,
    ...cells,
    ...labels,
    "</g></svg>\n",
  ].join("\n");
}

const label = (x, y, text, ink, align, size) =>
  `<text x="${round(x)}" y="${round(y)}" fill="${ink}" font-size="${size}" ` +
  `text-anchor="${align}">${escape(String(text))}</text>`;
