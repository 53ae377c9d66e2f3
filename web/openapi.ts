/** What the API says of itself: its OpenAPI document. */
import { createRoute, z } from "@hono/zod-openapi";
import * as config from "../config.ts";
import * as shapes from "./shapes.ts";
import type { App, Site } from "./site.ts";
import { Submission, submittable } from "./submit.ts";
import { MAX_FILES } from "./uploads.ts";

const problem = (description: string) => ({
  description,
  content: { "application/problem+json": { schema: shapes.ProblemShape } },
});

/** Where the document has what a kind's payload must be. */
const payloadRef = (kind: string) => `#/components/schemas/payload.${kind}`;

/** The route by which a job is submitted, with the kinds that this site has. */
export function submitRoute(site: Site) {
  const kinds = submittable(site);
  const fields = Submission.extend({
    kind: z.enum(kinds),
    payload: z.unknown().optional().openapi({
      description: "What it must be depends on the kind; {} if not given",
      anyOf: kinds.map((kind) => ({ $ref: payloadRef(kind) })),
    }),
  });
  const body = fields.openapi("Submission");
  const form = fields.extend({
    payload: z.string().optional().describe("As JSON text"),
    file: z.array(z.any().openapi({ type: "string", format: "binary" })).max(MAX_FILES).optional()
      .describe("Its input files, in the order in which the job gets them"),
  }).openapi("SubmissionForm");
  return createRoute({
    method: "post",
    path: "/jobs",
    summary: "Submit a job, with its files if it has some",
    request: {
      headers: z.object({
        "idempotency-key": z.string().min(1).max(200).optional().describe(
          "The same request with the same key again, within a day, gets the job of the first time",
        ),
      }),
      body: {
        required: true,
        content: { "application/json": { schema: body }, "multipart/form-data": { schema: form } },
      },
    },
    responses: {
      201: {
        description: "It is in line; Location is where it is",
        content: { "application/json": { schema: shapes.Submitted } },
      },
      200: {
        description: "It was there: by its unique_key, or by its Idempotency-Key",
        content: { "application/json": { schema: shapes.Submitted } },
      },
      400: problem("The body is not what its Content-Type says"),
      402: problem("You have too few credits"),
      408: problem("Nothing more of the body came"),
      409: problem("Its unique_key was taken and freed too often meanwhile"),
      413: problem("A file, or the JSON, is too large"),
      415: problem("The body is neither JSON nor a form with files"),
      422: problem("A field is malformed: errors says which, and the rule"),
      429: problem(
        "Too many in a minute, or the queue is full for you or for all: see Retry-After",
      ),
    },
  });
}

type Document = ReturnType<App["getOpenAPI31Document"]>;

/** The document of `app`, made when it is first asked for. */
export function documentOf(site: Site, app: App): () => Document {
  let made: Document | undefined;
  return () => made ??= make(site, app);
}

function make(site: Site, app: App): Document {
  app.openAPIRegistry.registerComponent("securitySchemes", "key", {
    type: "http",
    scheme: "bearer",
    description: "A key of the API, which whoever runs this site makes: deno task key create OWNER",
  });
  const document = app.getOpenAPI31Document({
    openapi: "3.1.0",
    info: {
      title: "Siding",
      version: config.VERSION,
      description:
        "Jobs: submit one, follow it, take home what it made. You see your own jobs only.",
    },
    servers: [{ url: "/api" }],
    security: [{ key: [] }],
  });
  const always = (description: string) => ({
    description,
    content: { "application/problem+json": { schema: { $ref: "#/components/schemas/Problem" } } },
  });
  const unknown = always("There is no key of the API with the request, or one that is not good");
  const away = always("The database cannot be reached, or too much is under way: see Retry-After");
  for (const path of Object.values(document.paths!)) {
    for (const operation of [path.get, path.post]) {
      if (operation) operation.responses = { 503: away, ...operation.responses, 401: unknown };
    }
  }
  for (const [kind, schema] of Object.entries(payloadSchemas(site))) {
    document.components!.schemas![`payload.${kind}`] = schema;
  }
  return document;
}

/** What the payload of each kind must be, as JSON Schema. */
export function payloadSchemas(site: Site): Record<string, Record<string, unknown>> {
  return Object.fromEntries(
    submittable(site).map((kind) => [kind, jsonSchema(site.kinds[kind].payload)]),
  );
}

/** What cannot be said in JSON Schema may be anything there; it is checked all the same. */
export function jsonSchema(schema: z.ZodType): Record<string, unknown> {
  const { $schema: _, ...rest } = z.toJSONSchema(schema, { io: "input", unrepresentable: "any" });
  return rest;
}
