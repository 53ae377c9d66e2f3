/**
 * Railway's API, as far as scaling needs it: how many replicas a service is to have, how many of
 * them run, and another number. Used by the controller and by schema_check.ts.
 *
 * A replica count belongs to a region. The whole count of a service is the sum over its regions,
 * and a write changes one of them: the others, and whatever else Railway keeps of a region, stay.
 */
import { z } from "zod";
import { HOUR_MS, RailwayError, send, type Transport } from "./railway_call.ts";

/**
 * All that is ever sent, whole: schema_check.ts sends these very texts to the live schema. Fields
 * of an input stand in the text and not in a variable, so that validation sees them too.
 */
export const operations = {
  // The count is the config's: a service instance has no multiRegionConfig to ask for, and its
  // numReplicas is stale for services placed by region.
  read: `query read($service: String!, $environment: String!) {
    environment(id: $environment) { config(decryptVariables: false) }
    serviceInstance(serviceId: $service, environmentId: $environment) {
      activeDeployments { id status deploymentStopped instances { id status } }
    }
  }`,
  update: `mutation update($service: String!, $environment: String!, $regions: JSON!) {
    serviceInstanceUpdate(
      serviceId: $service, environmentId: $environment, input: { multiRegionConfig: $regions }
    )
  }`,
  // Never environmentPatchCommitStaged: it commits everyone's staged work.
  commit: `mutation commit($environment: String!, $patch: EnvironmentConfig!, $message: String) {
    environmentPatchCommit(environmentId: $environment, patch: $patch, commitMessage: $message)
  }`,
} as const;
export type Operation = keyof typeof operations;

/** A service as it was seen at one moment. */
export interface Seen {
  /** How many replicas it is to have in each region. */
  regions: Record<string, number>;
  /** Their sum. */
  total: number;
  /** The region that a write changes. */
  region: string;
  /** The smallest sum that a write can make: one there, and what the other regions have. */
  least: number;
  /** How many instances run. Of a deploy that is under way both sides count. */
  running: number;
  /** How many have crashed, and do not run now. */
  crashed: number;
  deployments: Deployment[];
}

const Deployment = z.object({
  id: z.string(),
  status: z.string(),
  deploymentStopped: z.boolean(),
  instances: z.array(z.object({ id: z.string(), status: z.string() })),
});
export type Deployment = z.infer<typeof Deployment>;

const Read = z.object({
  environment: z.object({ config: z.object({ services: z.record(z.string(), z.unknown()) }) }),
  serviceInstance: z.object({ activeDeployments: z.array(Deployment) }),
});
const Count = z.number().int().min(0);
const Service = z.object({
  deploy: z.object({
    /** A region that was removed is null; one may be there without a count, with other keys only. */
    multiRegionConfig: z.record(
      z.string(),
      z.object({ numReplicas: Count.nullish() }).nullable(),
    ).nullish(),
    // Before there were several regions.
    numReplicas: Count.nullish(),
    region: z.string().nullish(),
  }).nullish(),
});

export interface RailwayOptions extends Transport {
  serviceId: string;
  environmentId: string;
  /** The region to scale. Needed where the service is in several. */
  region?: string;
  /**
   * The write: `update` is serviceInstanceUpdate; `commit` is environmentPatchCommit, for projects
   * where the first only records the number until the next deploy.
   */
  write?: "update" | "commit";
  /** A plan has 1,000 an hour (Hobby) or 10,000 (Pro), for everything that uses the account. */
  callsPerHour?: number;
  /** A clock that only goes forward. */
  now?: () => number;
}

/** One service in one environment. */
export class Railway {
  readonly #options: RailwayOptions;
  readonly #now: () => number;
  /** When the calls of the last hour were made. */
  #calls: number[] = [];
  #closedUntilMs = -Infinity;

  constructor(options: RailwayOptions) {
    this.#options = options;
    this.#now = options.now ?? (() => performance.now());
  }

  /** How many replicas there are to be, and what runs: one call. */
  async read(): Promise<Seen> {
    const { serviceId: service, environmentId: environment } = this.#options;
    const { environment: { config }, serviceInstance } = this.#check(
      Read,
      await this.#call("read", { service, environment }),
    );
    if (!Object.hasOwn(config.services, service)) {
      throw new RailwayError("settings", `the environment has no service ${service}`);
    }
    const { deploy } = this.#check(Service, config.services[service]);
    const regions: Record<string, number> = {};
    for (const [name, entry] of Object.entries(deploy?.multiRegionConfig ?? {})) {
      if (entry?.numReplicas) regions[name] = entry.numReplicas;
    }
    // A service that was never scaled has one replica, and its config may not say so.
    const only = deploy?.region ?? this.#options.region;
    if (Object.keys(regions).length === 0 && only) regions[only] = deploy?.numReplicas || 1;
    const sum = (counts: number[]) => counts.reduce((total, count) => total + count, 0);
    const total = sum(Object.values(regions));
    const region = this.#regionOf(regions);
    const deployments = serviceInstance.activeDeployments;
    const instances = deployments.filter((deployment) => !deployment.deploymentStopped)
      .flatMap((deployment) => deployment.instances);
    const count = (status: string) => instances.filter((i) => i.status === status).length;
    return {
      regions,
      total,
      region,
      least: total - (regions[region] ?? 0) + 1,
      running: count("RUNNING"),
      crashed: count("CRASHED"),
      deployments,
    };
  }

  /**
   * Makes the sum over all regions `total`, by the count of one region.
   *
   * A write without a reply may have taken effect, so it is looked for. Where it is not seen this
   * throws: to write again is for the next look, which reads first, whoever makes it by then.
   *
   * @param seen what was read before; other regions are taken to have what they had then
   */
  async write(total: number, seen: Seen): Promise<void> {
    const { serviceId: service, environmentId: environment } = this.#options;
    const { region, regions, least } = seen;
    const numReplicas = total - least + 1;
    if (numReplicas < 1) {
      const message =
        `${total} replicas cannot be: the other regions and one in ${region} are ${least}`;
      throw new RailwayError("settings", message);
    }
    const counts = { [region]: { numReplicas } };
    try {
      if (this.#options.write === "commit") {
        const patch = { services: { [service]: { deploy: { multiRegionConfig: counts } } } };
        const message = `Siding: ${regions[region] ?? 0} to ${numReplicas} in ${region}`;
        await this.#call("commit", { environment, patch, message });
      } else await this.#call("update", { service, environment, regions: counts });
    } catch (error) {
      if (!(error instanceof RailwayError && error.reason === "unreachable")) {
        throw error;
      }
      const now = await this.read().catch(() => null);
      if (now?.regions[region] !== numReplicas) throw error;
    }
  }

  #regionOf(regions: Record<string, number>): string {
    const names = Object.keys(regions);
    const region = this.#options.region ?? (names.length === 1 ? names[0] : undefined);
    if (region) return region;
    const where = names.length ? names.join(" and ") : "no region that its config names";
    throw new RailwayError(
      "settings",
      `the service is in ${where}: SIDING_RAILWAY_REGION must say which one is scaled`,
    );
  }

  /** Counts a call, and makes it. */
  async #call(operation: Operation, variables: Record<string, unknown>): Promise<unknown> {
    const { callsPerHour = 500 } = this.#options;
    const now = this.#now();
    this.#calls = this.#calls.filter((at) => at > now - HOUR_MS);
    const budgetMs = this.#calls.length < callsPerHour ? 0 : this.#calls[0] + HOUR_MS - now;
    const retryAfterMs = Math.max(budgetMs, this.#closedUntilMs - now);
    if (retryAfterMs > 0) {
      const why = budgetMs > 0 ? `the budget is ${callsPerHour} calls an hour` : "Railway said so";
      const message = `no call to Railway for another ${Math.ceil(retryAfterMs / 1000)} s: ${why}`;
      throw new RailwayError("limited", message, { retryAfterMs });
    }
    this.#calls.push(now);
    try {
      return await send(operations[operation], variables, this.#options);
    } catch (error) {
      if (error instanceof RailwayError && error.about.retryAfterMs) {
        this.#closedUntilMs = this.#now() + error.about.retryAfterMs;
      }
      throw error;
    }
  }

  /** What was asked for, all of it: half a look would pass for a smaller one. */
  #check<T>(schema: z.ZodType<T>, value: unknown): T {
    const { data, error } = schema.safeParse(value);
    if (!error) return data;
    const [{ path, message }] = error.issues;
    throw new RailwayError("unexpected", `Railway's reply: ${path.join(".")}: ${message}`);
  }
}
