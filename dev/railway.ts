/**
 * The local Railway: a GraphQL server over the part of Railway's schema that is used, which refuses
 * what Railway refuses with the same status, code and words, and replicas that follow the count.
 *
 *     POST /graphql/v2   Railway's API
 *     POST /mood         {"mood"?, "requests"?, "ceiling"?, "stale_ms"?, "records_only"?}: how it goes on
 *     POST /deploy       a deploy, which resets the count as one that applies the config file does
 *     GET /replicas      {"items": [{"id", "region", "status", "pid", "restarts"}]}
 */
import { once } from "node:events";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { json } from "node:stream/consumers";
import {
  buildSchema,
  type DocumentNode,
  execute,
  GraphQLError,
  type GraphQLSchema,
  parse,
  validate,
} from "graphql";
import { z } from "zod";
import { type Replica, Replicas, type ReplicasOptions } from "./replicas.ts";

/** How a call can go. */
export const moods = [
  "fine",
  /** "Not Authorized", with HTTP 400 … */
  "unauthorized",
  /** … or with 200, as it has been seen too. */
  "unauthorized-200",
  /** HTTP 429, with Retry-After. */
  "limited",
  /** HTTP 503, and nothing is done. */
  "unavailable",
  /** No reply, and nothing is done … */
  "hang",
  /** … or it is done all the same. */
  "apply-and-hang",
  /** The connection closes, and nothing is done … */
  "drop",
  /** … or it is done all the same. */
  "apply-and-drop",
  /** Data, and an error beside it. */
  "partial",
  /** HTTP 200, with a page of something in between. */
  "garbage",
] as const;
export type Mood = typeof moods[number];

/** What stays so until it is changed. */
export interface Conduct {
  /** The plan's most replicas: 6 on Hobby, 42 on Pro. */
  ceiling: number;
  /** For so long after a write the config that is read is the one before. */
  staleMs: number;
  /** serviceInstanceUpdate records the count, and replicas follow at the next deploy. */
  recordsOnly: boolean;
  /** What a 429 says. */
  retryAfterS: number;
}

/** Every service's, whatever the plan. */
const MOST = 50;

export interface RailwayOptions extends Omit<ReplicasOptions, "env">, Partial<Conduct> {
  port?: number;
  /** The service's `deploy` in the environment's config, at first and after a deploy. */
  deploy?: DeployConfig;
  serviceId?: string;
  environmentId?: string;
  /** Another schema, as Railway's may become. */
  schema?: string;
}

interface DeployConfig {
  multiRegionConfig?: Record<string, RegionConfig>;
  numReplicas?: number;
  region?: string;
  [key: string]: unknown;
}
type RegionConfig = { numReplicas?: number; [key: string]: unknown };

/** A local Railway that runs. */
export interface LocalRailway extends AsyncDisposable {
  /** Where its API is. */
  url: string;
  serviceId: string;
  environmentId: string;
  projectToken: string;
  accountToken: string;
  /** The names of the operations it was asked for, in vain or not. */
  calls: string[];
  /** The service's `deploy` in the environment's config, as it is now. */
  config(): DeployConfig;
  /** How many replicas there are to be, by region. */
  counts(): Record<string, number>;
  /** All that are there, of every deployment. */
  replicas(): Replica[];
  deployments: Replicas["list"];
  kill: Replicas["kill"];
  /** New replicas take the place of the old, and the count is what it was at first: one. */
  deploy(): string;
  /** How the next so many calls go, or all until it is changed. */
  setMood(mood: Mood, requests?: number): void;
  setConduct(conduct: Partial<Conduct>): void;
}

/** Starts a local Railway with one service, whose replicas are what `start` starts. */
export async function startRailway(options: RailwayOptions): Promise<LocalRailway> {
  const { port = 0, schema, ...rest } = options;
  await using cleanUp = new AsyncDisposableStack();
  const platform = cleanUp.use(new Platform(rest));
  const api = new Api(platform, buildSchema(schema ?? await readSchema()));
  const server = createServer((req, res) => {
    // What is left to fail here is the connection.
    serve(platform, api, req, res).catch(() => req.socket.destroy());
  });
  server.listen(port, "127.0.0.1");
  await once(server, "listening");
  cleanUp.defer(async () => {
    const closed = once(server, "close");
    server.close();
    server.closeAllConnections();
    await closed;
  });
  const all = cleanUp.move();
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}/graphql/v2`,
    serviceId: platform.serviceId,
    environmentId: platform.environmentId,
    projectToken: platform.projectToken,
    accountToken: platform.accountToken,
    calls: api.calls,
    config: () => structuredClone(platform.config),
    counts: () => countsOf(platform.config),
    replicas: () => platform.replicas.list().flatMap((deployment) => deployment.replicas),
    deployments: () => platform.replicas.list(),
    kill: (id, signal) => platform.replicas.kill(id, signal),
    deploy: () => platform.deploy({ reset: true }),
    setMood: (mood, requests) => api.setMood(mood, requests),
    setConduct: (conduct) => void Object.assign(platform.conduct, conduct),
    [Symbol.asyncDispose]: () => all.disposeAsync(),
  };
}

const readSchema = () => Deno.readTextFile(new URL("railway.graphql", import.meta.url));

/** What a service's config says of its counts. */
function countsOf({ multiRegionConfig, region, numReplicas }: DeployConfig) {
  const counts: Record<string, number> = {};
  for (const [name, entry] of Object.entries(multiRegionConfig ?? {})) {
    if (entry.numReplicas) counts[name] = entry.numReplicas;
  }
  if (Object.keys(counts).length === 0) counts[region ?? "us-west2"] = numReplicas ?? 1;
  return counts;
}

/** One environment with one service: its config, and the replicas that follow it. */
class Platform implements AsyncDisposable {
  readonly serviceId: string;
  readonly environmentId: string;
  readonly projectId = crypto.randomUUID();
  readonly projectToken = crypto.randomUUID();
  readonly accountToken = crypto.randomUUID();
  readonly conduct: Conduct;
  readonly replicas: Replicas;
  readonly drainMs: number;
  readonly overlapMs: number;
  readonly createdAt = new Date();
  config: DeployConfig;
  readonly #initial: DeployConfig;
  /** What reads show for a while after a write. */
  #stale: { config: DeployConfig; untilMs: number } | null = null;

  constructor(options: RailwayOptions) {
    const { deploy, ceiling = MOST, staleMs = 0, recordsOnly = false, retryAfterS = 30 } = options;
    this.conduct = { ceiling, staleMs, recordsOnly, retryAfterS };
    this.serviceId = options.serviceId ?? crypto.randomUUID();
    this.environmentId = options.environmentId ?? crypto.randomUUID();
    this.drainMs = options.drainMs ?? 0;
    this.overlapMs = options.overlapMs ?? 0;
    this.#initial = deploy ?? { multiRegionConfig: { "us-west2": { numReplicas: 1 } } };
    this.config = structuredClone(this.#initial);
    const env = {
      RAILWAY_PROJECT_ID: this.projectId,
      RAILWAY_ENVIRONMENT_ID: this.environmentId,
      RAILWAY_SERVICE_ID: this.serviceId,
    };
    this.replicas = new Replicas({ ...options, env }, countsOf(this.config));
  }

  /** The config as a read shows it. */
  shown(): DeployConfig {
    if (this.#stale && performance.now() > this.#stale.untilMs) this.#stale = null;
    return this.#stale?.config ?? this.config;
  }

  /** Changes the counts of the regions that are named; null removes one. */
  change(regions: unknown, { moves }: { moves: boolean }): void {
    const change = z.record(z.string(), z.looseObject({}).nullable()).safeParse(regions).data;
    if (!change) throw new GraphQLError("Problem processing request");
    const merged = { ...this.config.multiRegionConfig };
    for (const [name, entry] of Object.entries(change)) {
      if (entry) merged[name] = { ...merged[name], ...entry };
      else delete merged[name];
    }
    this.#check(merged);
    this.#keep({ ...this.config, multiRegionConfig: merged });
    if (moves) this.replicas.scale(countsOf(this.config));
  }

  /** Railway's rules; the words are not known to be its own. */
  #check(regions: Record<string, RegionConfig>): void {
    let total = 0;
    for (const { numReplicas = 1 } of Object.values(regions)) {
      if (!Number.isInteger(numReplicas) || numReplicas < 1) {
        throw new GraphQLError("numReplicas must be a whole number of at least 1");
      }
      total += numReplicas;
    }
    if (total > MOST) throw new GraphQLError(`A service can have at most ${MOST} replicas`);
    const { ceiling } = this.conduct;
    if (total > ceiling) {
      throw new GraphQLError(`Replica limit exceeded: your plan allows ${ceiling} replicas`);
    }
  }

  #keep(config: DeployConfig): void {
    this.#stale = { config: this.config, untilMs: performance.now() + this.conduct.staleMs };
    this.config = config;
  }

  deploy({ reset }: { reset: boolean }): string {
    if (reset) [this.config, this.#stale] = [structuredClone(this.#initial), null];
    return this.replicas.deploy(countsOf(this.config));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.replicas[Symbol.asyncDispose]();
  }
}

/** What a call brings along: why it is refused, if it is. */
interface Context {
  refusal?: string;
}
type Ids = { serviceId?: string; environmentId?: string };

/** The GraphQL of it. */
class Api {
  readonly calls: string[] = [];
  #mood: Mood = "fine";
  #left = Infinity;

  constructor(readonly platform: Platform, readonly schema: GraphQLSchema) {}

  setMood(mood: Mood, requests = Infinity): void {
    this.#mood = mood;
    this.#left = requests;
  }

  /** The mood for a call that has arrived. */
  takeMood(): Mood {
    const mood = this.#mood;
    if (--this.#left <= 0) this.setMood("fine");
    return mood;
  }

  /** Parses, validates and then executes, in this order, which is why a wrong query needs no token. */
  async answer(body: unknown, context: Context): Promise<{ status: number; body: unknown }> {
    const call = Call.safeParse(body).data;
    if (!call) {
      return failed(400, "BAD_REQUEST", [new GraphQLError("GraphQL operations must have a query")]);
    }
    const { query, variables, operationName } = call;
    let document: DocumentNode;
    try {
      document = parse(query);
    } catch (error) {
      return failed(400, "GRAPHQL_PARSE_FAILED", [error as GraphQLError]);
    }
    const problems = validate(this.schema, document);
    if (problems.length > 0) return failed(400, "GRAPHQL_VALIDATION_FAILED", problems);
    const result = await execute({
      schema: this.schema,
      document,
      rootValue: this.#root,
      contextValue: context,
      variableValues: variables,
      operationName,
    });
    if (!result.errors) return { status: 200, body: result };
    // Nothing was executed: a variable does not fit.
    if (!("data" in result)) return failed(400, "BAD_USER_INPUT", result.errors);
    const isRefusal = result.errors.some(({ message }) => message === context.refusal);
    return failed(isRefusal ? 400 : 200, "INTERNAL_SERVER_ERROR", result.errors, null);
  }

  /** The refusal comes with the execution, and an id that is not ours is refused like a token. */
  #admit(ids: Ids, context: Context): void {
    const { serviceId, environmentId } = this.platform;
    const isOurs = (ids.serviceId ?? serviceId) === serviceId &&
      (ids.environmentId ?? environmentId) === environmentId;
    if (!isOurs) context.refusal ??= "Not Authorized";
    if (context.refusal) throw new GraphQLError(context.refusal);
  }

  readonly #root = {
    environment: ({ id }: { id: string }, context: Context) => {
      this.#admit({ environmentId: id }, context);
      const { projectId, serviceId, createdAt } = this.platform;
      return {
        config: { services: { [serviceId]: { deploy: this.platform.shown() } } },
        createdAt,
        id,
        isEphemeral: false,
        name: "production",
        projectId,
        updatedAt: createdAt,
      };
    },
    serviceInstance: (ids: Ids, context: Context) => {
      this.#admit(ids, context);
      return this.#service();
    },
    serviceInstanceUpdate: (
      { input, ...ids }: Ids & { input: Record<string, unknown> },
      context: Context,
    ) => {
      this.#admit(ids, context);
      const moves = !this.platform.conduct.recordsOnly;
      if (input.multiRegionConfig) this.platform.change(input.multiRegionConfig, { moves });
      return true;
    },
    environmentPatchCommit: (
      { environmentId, patch }: { environmentId: string; patch: unknown },
      context: Context,
    ) => {
      this.#admit({ environmentId }, context);
      const regions = Patch.safeParse(patch).data?.services[this.platform.serviceId];
      if (regions) this.platform.change(regions.deploy.multiRegionConfig, { moves: true });
      return crypto.randomUUID();
    },
    serviceInstanceDeployV2: (ids: Ids, context: Context) => {
      this.#admit(ids, context);
      return this.platform.deploy({ reset: false });
    },
  };

  #service() {
    const { projectId, serviceId, environmentId, createdAt, drainMs, overlapMs } = this.platform;
    const deployments = this.platform.replicas.list().map(({ replicas, ...deployment }) => ({
      ...deployment,
      deploymentStopped: replicas.length === 0,
      environmentId,
      instances: replicas,
      projectId,
      serviceId,
    }));
    return {
      activeDeployments: deployments,
      createdAt,
      drainingSeconds: Math.round(drainMs / 1000),
      environmentId,
      id: serviceId,
      isUpdatable: true,
      latestDeployment: deployments[0],
      // Stale, as Railway's is for a service that is placed by region.
      numReplicas: 1,
      overlapSeconds: Math.round(overlapMs / 1000),
      region: null,
      restartPolicyMaxRetries: 10,
      restartPolicyType: "ON_FAILURE",
      serviceId,
      serviceName: "worker",
      updatedAt: createdAt,
    };
  }
}

const Call = z.object({
  query: z.string(),
  variables: z.record(z.string(), z.unknown()).nullish(),
  operationName: z.string().nullish(),
});
const Patch = z.object({
  services: z.record(
    z.string(),
    z.object({ deploy: z.object({ multiRegionConfig: z.unknown() }) }),
  ),
});

/** A reply that is an error. Without `data`, nothing was executed. */
function failed(status: number, code: string, errors: readonly GraphQLError[], data?: null) {
  const items = errors.map((error) => ({ ...error.toJSON(), extensions: { code } }));
  return { status, body: { errors: items, data } };
}

async function serve(platform: Platform, api: Api, req: IncomingMessage, res: ServerResponse) {
  const route = `${req.method} ${new URL(req.url!, "http://railway").pathname}`;
  if (route === "POST /graphql/v2") return await call(platform, api, req, res);
  if (route === "POST /mood") return await setMood(platform, api, req, res);
  if (route === "POST /deploy") return reply(res, 200, { id: platform.deploy({ reset: true }) });
  if (route === "GET /replicas") {
    return reply(res, 200, { items: platform.replicas.list().flatMap(({ replicas }) => replicas) });
  }
  reply(res, 404, { error: "there is nothing here" });
}

/** Takes a call in, as the mood of the moment has it. */
async function call(platform: Platform, api: Api, req: IncomingMessage, res: ServerResponse) {
  const body = await json(req).catch(() => undefined);
  const query = Call.safeParse(body).data?.query ?? "";
  api.calls.push(/^\s*(?:query|mutation)\s+(\w+)/.exec(query)?.[1] ?? "");
  const mood = api.takeMood();
  if (mood === "hang") return;
  if (mood === "drop") return void req.socket.destroy();
  if (mood === "unavailable") return page(res, 503, "Service Unavailable");
  if (mood === "garbage") return page(res, 200, "Just a moment…");
  if (mood === "limited") {
    res.setHeader("retry-after", platform.conduct.retryAfterS);
    return reply(res, 429, { errors: [{ message: "Rate limit exceeded" }] });
  }
  const refusal = mood.startsWith("unauthorized") ? "Not Authorized" : refusalOf(platform, req);
  const answer = await api.answer(body, { refusal });
  if (mood === "apply-and-hang") return;
  if (mood === "apply-and-drop") return void req.socket.destroy();
  if (mood === "unauthorized-200") answer.status = 200;
  if (mood === "partial") {
    const code = "INTERNAL_SERVER_ERROR";
    const errors = [{ message: "Problem processing request", extensions: { code } }];
    answer.body = { ...answer.body as object, errors };
  }
  reply(res, answer.status, answer.body);
}

/** What Railway says of the token of a call, if it is not the right one in the right header. */
function refusalOf(platform: Platform, { headers }: IncomingMessage): string | undefined {
  const project = headers["project-access-token"];
  if (project !== undefined) {
    return project === platform.projectToken ? undefined : "Project Token not found";
  }
  const isKnown = headers.authorization === `Bearer ${platform.accountToken}`;
  return isKnown ? undefined : "Not Authorized";
}

async function setMood(platform: Platform, api: Api, req: IncomingMessage, res: ServerResponse) {
  const schema = z.strictObject({
    mood: z.enum(moods).optional(),
    requests: z.int().min(1).optional(),
    ceiling: z.int().min(1).optional(),
    stale_ms: z.int().min(0).optional(),
    records_only: z.boolean().optional(),
  });
  const wanted = schema.safeParse(await json(req).catch(() => undefined)).data;
  if (!wanted) {
    const fields = '{"mood"?, "requests"?, "ceiling"?, "stale_ms"?, "records_only"?}';
    return reply(res, 400, { error: `wanted is ${fields}, and a mood is ${moods.join(", ")}` });
  }
  const { conduct } = platform;
  if (wanted.mood) api.setMood(wanted.mood, wanted.requests);
  conduct.ceiling = wanted.ceiling ?? conduct.ceiling;
  conduct.staleMs = wanted.stale_ms ?? conduct.staleMs;
  conduct.recordsOnly = wanted.records_only ?? conduct.recordsOnly;
  reply(res, 200, wanted);
}

function reply(res: ServerResponse, status: number, body: unknown): void {
  res.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(body));
}

/** What no API says, but something in front of one. */
function page(res: ServerResponse, status: number, title: string): void {
  res.writeHead(status, { "content-type": "text/html" }).end(`<title>${title}</title>`);
}
