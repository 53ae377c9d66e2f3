/**
 * The door for agents: the Model Context Protocol by streamable HTTP under /mcp, with the keys and the
 * limits of the API. It keeps no session: every request stands by itself, so that any number of sites
 * may answer. A tool that cannot do what it was asked says why in the words of the API.
 */
import { OpenAPIHono, z } from "@hono/zod-openapi";
import { Server } from "@modelcontextprotocol/sdk/server/index.js";
import { WebStandardStreamableHTTPServerTransport } from "@modelcontextprotocol/sdk/server/webStandardStreamableHttp.js";
import {
  type CallToolRequest,
  CallToolRequestSchema,
  type CallToolResult,
  ErrorCode,
  ListToolsRequestSchema,
  McpError,
} from "@modelcontextprotocol/sdk/types.js";
import * as config from "../config.ts";
import { writeFile } from "../files.ts";
import { COUNTED_TO, queueStatus } from "../listing.ts";
import { assertLeft, bearer } from "./auth.ts";
import { cancelJob, visibleJobs, wholeJob } from "./jobs.ts";
import { jsonSchema, payloadSchemas } from "./openapi.ts";
import { Problem, problemOf, unfit } from "./problem.ts";
import { JobQuery } from "./shapes.ts";
import type { App, Env, Site, Who } from "./site.ts";
import { limitKey, Submission, submit, SUBMITTED } from "./submit.ts";
import { discard, MAX_FILES, type Upload, withJson } from "./uploads.ts";

/** A request, with the files that are in it. Larger ones are uploaded by the API. */
const MAX_REQUEST_BYTES = 8_000_000;

const InlineFile = z.strictObject({ name: z.string().min(1).max(255), base64: z.base64() });

/** The input of each tool. */
const inputs = {
  submit_job: Submission.extend({
    idempotency_key: z.string().min(1).max(200).optional()
      .describe("The same request with the same key again gets the job of the first time"),
    files: z.array(InlineFile).max(MAX_FILES).optional()
      .describe("Input files, small ones; larger ones are uploaded to POST /api/jobs"),
  }),
  get_job: z.strictObject({ id: z.string() }),
  list_jobs: JobQuery.extend({ limit: z.int().min(1).max(200).default(50) }),
  cancel_job: z.strictObject({ id: z.string() }),
  queue_status: z.strictObject({}),
};
type ToolName = keyof typeof inputs;

const descriptions: Record<ToolName, string> = {
  submit_job: "Submits a job, which a worker will run. Returns its id at once.",
  get_job:
    "All of one job: its status, stage and progress, result or error, and its files, whose urls " +
    "are for downloading from this site with the same key.",
  list_jobs: "Your jobs, the newest first, a page at a time.",
  cancel_job: "Cancels a job: at once when it waits, else its worker is asked to end it.",
  queue_status: "The queues: paused or not, their limits, and how many jobs are in them.",
};

/** The route /mcp. */
export function mcp(site: Site): App {
  const app: App = new OpenAPIHono<Env>();
  app.use(bearer(site));
  app.all("/", async (c) => {
    // The other methods are for sessions, which there are none of.
    if (c.req.method !== "POST") throw new Problem(405, "/mcp takes POST alone");
    return await withJson(c.req.raw, async (message) => {
      // The protocol has no batches any more, and the answers of one are held until the last is there:
      // 100 lists of jobs that failed were 170 MB.
      if (Array.isArray(message)) throw new Problem(400, "/mcp takes one message at a time");
      return await answered(serverFor(site, c.get("who")), c.req.raw, message);
    }, MAX_REQUEST_BYTES);
  });
  return app;
}

async function answered(server: Server, request: Request, message: unknown): Promise<Response> {
  const transport = new WebStandardStreamableHTTPServerTransport({
    sessionIdGenerator: undefined,
    enableJsonResponse: true,
  });
  await server.connect(transport);
  try {
    return await transport.handleRequest(request, { parsedBody: message });
  } finally {
    await server.close();
  }
}

function serverFor(site: Site, who: Who): Server {
  const server = new Server({ name: "siding", version: config.VERSION }, {
    capabilities: { tools: {} },
    instructions:
      "A job queue. Submit a job, then ask for it until its status is done, failed or " +
      "cancelled. You see your own jobs only.",
  });
  server.setRequestHandler(ListToolsRequestSchema, () => ({ tools: toolsOf(site) }));
  server.setRequestHandler(CallToolRequestSchema, async ({ params }: CallToolRequest) => {
    if (!Object.hasOwn(inputs, params.name)) {
      throw new McpError(ErrorCode.InvalidParams, `there is no tool ${params.name}`);
    }
    return await call(site, who, params.name as ToolName, params.arguments ?? {});
  });
  return server;
}

function toolsOf(site: Site) {
  return (Object.keys(inputs) as ToolName[]).map((name) => {
    const inputSchema = jsonSchema(inputs[name]) as {
      type: "object";
      properties: Record<string, object>;
    };
    if (name === "submit_job") {
      const payloads = payloadSchemas(site);
      Object.assign(inputSchema.properties.kind, { enum: Object.keys(payloads) });
      inputSchema.properties.payload = {
        description: "What it must be depends on the kind",
        anyOf: Object.entries(payloads).map(([kind, schema]) => ({ title: kind, ...schema })),
      };
    }
    return {
      name,
      description: descriptions[name],
      inputSchema,
      annotations: { readOnlyHint: !/submit|cancel/.test(name), openWorldHint: false },
    };
  });
}

/** What a tool answers; that it could not do it is an answer too. */
async function call(site: Site, who: Who, name: ToolName, given: unknown): Promise<CallToolResult> {
  try {
    const result = await run(site, who, name, given);
    return { content: [{ type: "text", text: JSON.stringify(result) }] };
  } catch (error) {
    const { message, extra } = problemOf(error);
    const later = extra.retryAfterS ? `; come back in ${Math.ceil(extra.retryAfterS)} s` : "";
    return { content: [{ type: "text", text: message + later }], isError: true };
  }
}

async function run(site: Site, who: Who, name: ToolName, given: unknown): Promise<unknown> {
  switch (name) {
    case "submit_job":
      return await submitWithFiles(site, who, checked(inputs.submit_job, given));
    case "get_job":
      return await wholeJob(site, who, checked(inputs.get_job, given).id);
    case "list_jobs":
      return await visibleJobs(site, who, checked(inputs.list_jobs, given));
    case "cancel_job":
      return await cancelJob(site, who, checked(inputs.cancel_job, given).id);
    case "queue_status":
      checked(inputs.queue_status, given);
      return { items: await site.db.run(queueStatus), counted_to: COUNTED_TO };
  }
}

/** @throws Problem 422 that names each field, as the API does */
function checked<T extends z.ZodType>(schema: T, given: unknown): z.output<T> {
  const parsed = schema.safeParse(given);
  if (!parsed.success) throw unfit(parsed.error, given);
  return parsed.data;
}

async function submitWithFiles(
  site: Site,
  who: Who,
  { files = [], idempotency_key, ...job }: z.output<typeof inputs.submit_job>,
) {
  await assertLeft(site.limits.submit, limitKey(who), SUBMITTED);
  const stored: Upload[] = [];
  let created = false;
  try {
    for (const { name, base64 } of files) {
      const bytes = Uint8Array.fromBase64(base64);
      const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes)).toHex();
      const content = new Blob([bytes]).stream();
      const file = await writeFile(site.files, name, content, site.settings.maxFileBytes);
      stored.push({ id: file.id, name: file.name, sha256: hash });
    }
    const entry = await submit(site, who, job, stored, idempotency_key);
    created = entry.created;
    return entry;
  } finally {
    if (!created) await discard(site, stored);
  }
}
