/** The API's OpenAPI document as a page for people to read. */
import { html } from "hono/html";
import { scrolling } from "./pages/layout.ts";

/** As much of JSON Schema as the document has. */
interface Shape {
  $ref?: string;
  type?: string | string[];
  description?: string;
  enum?: unknown[];
  const?: unknown;
  format?: string;
  pattern?: string;
  minimum?: number;
  maximum?: number;
  minLength?: number;
  maxLength?: number;
  maxItems?: number;
  default?: unknown;
  items?: Shape;
  anyOf?: Shape[];
  properties?: Record<string, Shape>;
  required?: string[];
}
interface Operation {
  summary?: string;
  description?: string;
  parameters?: { name: string; in: string; required?: boolean; schema: Shape }[];
  requestBody?: { content: Record<string, { schema: Shape }> };
  responses: Record<string, { description: string; content?: Record<string, { schema?: Shape }> }>;
}
interface Described {
  info: { title: string; version: string; description?: string };
  paths: Record<string, Record<string, Operation>>;
  components: { schemas: Record<string, Shape> };
}
type Html = ReturnType<typeof html>;

/** @param document an OpenAPI document, of which this shows what a reader needs */
export function apiPage(document: unknown): Html {
  const { info, paths, components } = document as Described;
  const operations = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, it]) => operation(method.toUpperCase(), path, it))
  );
  const shapes = Object.entries(components.schemas).map(([name, shape]) =>
    html`<section class="card" id="${anchor(name)}"><h3>${name}</h3>${fields(shape)}</section>`
  );
  return html`
    <h1>The API of ${info.title}</h1>
    <p>${info
      .description} For programs it is described by <a href="/api/openapi.json">openapi.json</a>;
    for agents there is an MCP endpoint at <code>/mcp</code>, with the same keys.</p>
    <pre>curl -H "Authorization: Bearer $KEY" -F kind=transcribe -F file=@song.wav https://…/api/jobs</pre>
    <p>What cannot be done as asked is answered with a problem (RFC 9457), which names each field at fault,
    its value and the rule.</p>
    <h2>Requests</h2>
    ${operations}
    <h2>Shapes</h2>
    ${shapes}
  `;
}

function operation(method: string, path: string, it: Operation): Html {
  const parameters = (it.parameters ?? []).map(({ name, in: place, required, schema }) =>
    html`
      <tr>
        <td><code>${name}</code></td>
        <td>${place}${required ? ", needed" : ""}</td>
        <td>${rule(schema)}</td>
      </tr>
    `
  );
  const bodies = Object.entries(it.requestBody?.content ?? {}).map(([type, { schema }]) =>
    html`<p>Body: <code>${type}</code>, ${rule(schema)}</p>`
  );
  const responses = Object.entries(it.responses).map(([status, { description, content }]) =>
    html`
      <tr>
        <td>${status}</td>
        <td>${description}</td>
        <td>${Object.values(content ?? {}).map(({ schema }) => schema ? rule(schema) : "")}</td>
      </tr>
    `
  );
  return html`<section class="card">
<h3><code>${method} /api${path}</code></h3>
<p>${it.summary}. ${it.description ?? ""}</p>
${parameters.length ? table(["Parameter", "Where", "What"], parameters) : ""}
${bodies}
${table(["Status", "When", "Body"], responses)}
</section>`;
}

const table = (heads: string[], rows: Html[]) =>
  scrolling(
    heads.join(", "),
    html`
      <table>
        <thead>
          <tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr>
        </thead>
        <tbody>${rows}</tbody>
      </table>
    `,
  );

function fields({ properties = {}, required = [] }: Shape): Html {
  const rows = Object.entries(properties).map(([name, shape]) =>
    html`
      <tr>
        <td><code>${name}</code></td>
        <td>${required.includes(name) ? "always" : "may be missing"}</td>
        <td>${rule(shape)}</td>
      </tr>
    `
  );
  return rows.length ? table(["Field", "There", "What"], rows) : html`<p>Any JSON.</p>`;
}

const anchor = (name: string) => `shape-${name.replaceAll(".", "-")}`;

/** What a value may be, in a few words. */
function rule(shape: Shape): Html {
  if (shape.$ref) {
    const name = shape.$ref.split("/").at(-1)!;
    return html`<a href="#${anchor(name)}">${name}</a>`;
  }
  const types = [shape.type ?? []].flat().join(" or ");
  const words = [
    shape.enum ? `one of ${shape.enum.join(", ")}` : shape.format ?? types,
    shape.minimum !== undefined && `from ${shape.minimum}`,
    shape.maximum !== undefined && `to ${shape.maximum}`,
    shape.minLength !== undefined && `at least ${shape.minLength} long`,
    shape.maxLength !== undefined && `at most ${shape.maxLength} long`,
    shape.maxItems !== undefined && `at most ${shape.maxItems}`,
    shape.pattern && `matches ${shape.pattern}`,
    shape.default !== undefined && `${shape.default} if not given`,
  ].filter(Boolean).join(", ");
  const inner = [...(shape.anyOf ?? []), ...(shape.items ? [shape.items] : [])]
    .map((one, at) => html`${at ? ", " : " of "}${rule(one)}`);
  return html`${words}${inner}${shape.description ? `. ${shape.description}` : ""}`;
}
