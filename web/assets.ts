/** The site's static files: its own, and those of the packages that its pages draw with. */
import { createHash } from "node:crypto";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";
import { Hono } from "hono";
import type { Env } from "./site.ts";

const types: Record<string, string> = {
  css: "text/css; charset=utf-8",
  js: "text/javascript; charset=utf-8",
  svg: "image/svg+xml",
};

const require = createRequire(import.meta.url);
const own = (name: string) => fileURLToPath(new URL(`./static/${name}`, import.meta.url));
const paths: Record<string, string> = {
  "siding.css": own("siding.css"),
  "figures.css": own("figures.css"),
  "forms.css": own("forms.css"),
  "siding.svg": own("siding.svg"),
  "live.js": own("live.js"),
  "charts.js": own("charts.js"),
  "score.js": own("score.js"),
  "uplot.js": require.resolve("uplot/dist/uPlot.iife.min.js"),
  "uplot.css": require.resolve("uplot/dist/uPlot.min.css"),
  "abcjs.js": require.resolve("abcjs/dist/abcjs-basic-min.js"),
};

/** Read once, when the site starts: half a megabyte in all. */
const files = new Map(
  Object.entries(paths).map(([name, path]) => {
    const bytes = Deno.readFileSync(path);
    const hash = createHash("sha256").update(bytes).digest("hex").slice(0, 16);
    return [name, { bytes, hash }];
  }),
);

/** The address of a static file: another one whenever its content is another. */
export const asset = (name: string) => `/static/${name}?v=${files.get(name)!.hash}`;

export function assets(): Hono<Env> {
  const app = new Hono<Env>();
  app.get("/static/:name", (c, next) => {
    const name = c.req.param("name");
    const file = files.get(name);
    if (!file) return next();
    const { bytes, hash } = file;
    const headers = {
      etag: `"${hash}"`,
      "cache-control": c.req.query("v") === hash
        ? "public, max-age=31536000, immutable"
        : "no-cache",
    };
    // Compressed on the way, an entity tag becomes a weak one.
    if (c.req.header("if-none-match")?.replace(/^W\//, "") === headers.etag) {
      return c.body(null, 304, headers);
    }
    return c.body(bytes, 200, {
      ...headers,
      "content-type": types[name.split(".").at(-1)!],
      "x-content-type-options": "nosniff",
    });
  });
  return app;
}
