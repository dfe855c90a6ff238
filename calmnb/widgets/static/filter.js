// What may be typed into a table's filter: pure functions, no DOM.

export const FILTER_HELP = [
  "Words separated by spaces must all be found in the row's texts; capitals do not matter.",
  "-word leaves out rows with the word;  \"two words\" looks for both together.",
  "column:word looks in one column;  layer:3-7 takes a span of numbers.",
  "column>5, >=, <, <=, = compare numbers:  time>20 gbs<8.",
];

const TERM = /^(-?)(?:([\p{L}\p{N}_%/]+)(:|>=|<=|>|<|=))?(.*)$/u;

function words(text) {
  const out = [];
  for (const match of text.matchAll(/(?:[^\s"]|"[^"]*"?)+/g)) out.push(match[0].replaceAll('"', ""));
  return out;
}

/** Find a column by its key or one of its other names. */
function columnNamed(columns, name) {
  const wanted = name.toLowerCase();
  return columns.find((column) => [column.key, column.title, ...(column.names || [])].some((known) => String(known).toLowerCase() === wanted));
}

function numberTest(column, sign, text) {
  const span = sign === ":" && /^(-?[\d.]+)-([\d.]+)$/.exec(text);
  if (span) {
    const [low, high] = [Number(span[1]), Number(span[2])];
    return (i) => column.value(i) >= low && column.value(i) <= high;
  }
  const wanted = text.trim() === "" ? NaN : Number(text);
  if (Number.isNaN(wanted)) return null;
  switch (sign) {
    case ">": return (i) => column.value(i) > wanted;
    case ">=": return (i) => column.value(i) >= wanted;
    case "<": return (i) => column.value(i) < wanted;
    case "<=": return (i) => column.value(i) <= wanted;
    default: return (i) => column.value(i) === wanted;
  }
}

/**
 * Read a filter. `columns` have key, names, isText, value(i) (number, or text where isText). Returns {keep, problem}:
 * keep(i), or null where everything passes; problem says what was not understood, or is empty.
 */
export function readFilter(text, columns) {
  const tests = [];
  const texts = columns.filter((column) => column.isText);
  for (const word of words(text.trim())) {
    const [, minus, name, sign, rest] = TERM.exec(word);
    let test = null;
    if (name) {
      const column = columnNamed(columns, name);
      if (!column) return { keep: null, problem: `no column "${name}"; there are ${columns.map((c) => c.names?.[0] ?? c.key).join(", ")}` };
      if (!rest) continue;  // still being typed
      if (column.isText && (sign === ":" || sign === "=")) {
        const wanted = rest.toLowerCase();
        test = sign === "=" ? (i) => column.value(i).toLowerCase() === wanted : (i) => column.value(i).toLowerCase().includes(wanted);
      } else {
        test = column.isText ? null : numberTest(column, sign, rest);
        if (!test) return { keep: null, problem: column.isText ? `"${name}" holds text: write ${name}:word` : `"${rest}" is no number` };
      }
    } else if (rest) {
      const wanted = rest.toLowerCase();
      test = (i) => texts.some((column) => column.value(i).toLowerCase().includes(wanted));
    }
    if (test) tests.push(minus ? (i) => !test(i) : test);
  }
  return { keep: tests.length ? (i) => tests.every((test) => test(i)) : null, problem: "" };
}
