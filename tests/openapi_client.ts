/**
 * A client that knows of an API what its OpenAPI document says, and no more: it fails when the API
 * answers in a way that the document does not have.
 */
import { assert } from "@std/assert";
import { z } from "zod";
import type { RunningSite } from "./site.ts";

type Json = Record<string, unknown>;
interface Operation {
  parameters?: {
    name: string;
    in: "path" | "query" | "header";
    required?: boolean;
    schema: Json;
  }[];
  requestBody?: { content: Record<string, { schema: Json }> };
  responses: Record<string, { content?: Record<string, { schema?: Json }> }>;
}

export interface Reply {
  status: number;
  headers: Headers;
  /** Parsed, where it is JSON. */
  // deno-lint-ignore no-explicit-any -- whatever JSON the test expects
  body: any;
  response: Response;
}

export interface Request {
  /** Path, query and header parameters by name. */
  with?: Record<string, string | number | undefined>;
  json?: unknown;
  form?: FormData;
  /** Sent though the document does not allow it: to see it refused. */
  odd?: { body?: BodyInit; type?: string };
  signal?: AbortSignal;
}

export class OpenApiClient {
  private constructor(
    readonly paths: Record<string, Record<string, Operation>>,
    readonly schemas: Record<string, Json>,
    readonly address: string,
    readonly token: string | null,
  ) {}

  /** Reads the document at `url`. */
  static async at(url: string, token: string | null): Promise<OpenApiClient> {
    const { openapi, paths, components, servers } = await (await fetch(url)).json();
    assert(openapi === "3.1.0");
    const base = new URL(servers[0].url, url).href;
    return new OpenApiClient(paths, components.schemas, base, token);
  }

  as(token: string | null): OpenApiClient {
    return new OpenApiClient(this.paths, this.schemas, this.address, token);
  }

  /** Calls an operation of the document, and checks the answer by it. */
  async call(method: "get" | "post", path: string, request: Request = {}): Promise<Reply> {
    const operation = this.paths[path]?.[method];
    assert(operation, `the document has ${method} ${path}`);
    const headers = new Headers();
    if (this.token) headers.set("authorization", `Bearer ${this.token}`);
    const query = new URLSearchParams();
    let filled = path;
    for (const [name, value] of Object.entries(request.with ?? {})) {
      if (value === undefined) continue;
      const place = operation.parameters?.find((parameter) => parameter.name === name)?.in;
      if (place === "path") filled = filled.replace(`{${name}}`, encodeURIComponent(value));
      else if (place === "header") headers.set(name, String(value));
      else query.set(name, String(value)); // also one that the document does not have
    }
    let body: BodyInit | undefined = request.form ?? request.odd?.body;
    if (request.json !== undefined) {
      headers.set("content-type", "application/json");
      body = JSON.stringify(request.json);
    }
    if (request.odd?.type) headers.set("content-type", request.odd.type);
    const search = query.size ? `?${query}` : "";
    const response = await fetch(this.address + filled + search, {
      method: method.toUpperCase(),
      headers,
      body,
      signal: request.signal,
    });
    return await this.#checked(`${method} ${path}`, operation, response);
  }

  async #checked(name: string, operation: Operation, response: Response): Promise<Reply> {
    const { status, headers } = response;
    const documented = operation.responses[status];
    if (!documented) {
      throw new Error(`${name}: ${status} is not in the document: ${await response.text()}`);
    }
    const type = headers.get("content-type");
    const content = type === null ? undefined : documented.content?.[type];
    const opaque = documented.content?.["application/octet-stream"] || type === "text/event-stream";
    if (opaque) return { status, headers, body: null, response };
    assert(status === 204 || content, `${name}: ${status} is documented with ${type}`);
    const body = content ? await response.json() : null;
    if (content?.schema) this.assertFits(name, content.schema, body);
    return { status, headers, body, response };
  }

  /** Throws unless a value is as a schema of the document says, with no field more. */
  assertFits(name: string, schema: Json, value: unknown): void {
    const whole = local({ ...schema, $defs: this.schemas }) as Parameters<
      typeof z.fromJSONSchema
    >[0];
    const { success, error } = z.fromJSONSchema(whole).safeParse(value);
    assert(success, `${name}: ${error?.message} in ${JSON.stringify(value)}`);
  }
}

/** The same schema with references that lead to its own definitions, and closed objects. */
function local(schema: unknown): unknown {
  if (Array.isArray(schema)) return schema.map(local);
  if (typeof schema !== "object" || schema === null) return schema;
  const copy: Json = Object.fromEntries(
    Object.entries(schema).map(([key, value]) => [
      key,
      key === "$ref" ? String(value).replace("#/components/schemas/", "#/$defs/") : local(value),
    ]),
  );
  return copy.type === "object" && copy.properties
    ? { additionalProperties: false, ...copy }
    : copy;
}

/** A client of a site, with somebody's key. */
export const clientOf = (site: RunningSite, token: string | null) =>
  OpenApiClient.at(`${site.address}/api/openapi.json`, token);

/** A form, in the order given. */
export function formOf(
  fields: Record<string, string>,
  ...files: [name: string, content: BlobPart][]
) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  for (const [name, content] of files) form.append("file", new Blob([content]), name);
  return form;
}
