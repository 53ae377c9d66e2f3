/**
 * Jobs, replicas and the platform, simulated event by event. A free worker takes a job at once
 * (in truth it looks every 2 s); replicas take time to start; the platform picks the one that
 * stops; replicas crash. What becomes of their jobs is as worker.ts and siding.recover have it.
 */
import { random } from "../chaos/faults.ts";
import type { Look } from "../../policy.ts";
import { Events } from "./events.ts";
import type { Scaler } from "./scalers.ts";
import type { Trace } from "./trace.ts";

export interface World {
  /** Draws victims and crashes. */
  seed: number;
  /** Seconds from a written count to a worker that takes jobs. */
  startS: number;
  /** Seconds that the jobs of a stopped replica have to end. */
  drainS: number;
  /** Seconds until the jobs of a crashed replica are taken back. */
  leaseS: number;
  /** The crash of a job's worker that fails the job. */
  maxCrashes: number;
  /** Per hour that a replica works. */
  crashesPerHour: number;
  /** Jobs at a time of a replica. */
  concurrency: number;
}

/** What became of a trace. */
export interface Result {
  /**
   * In ascending order: of each job that was done, the time from its arrival to its end, less its
   * run. So what an interrupted attempt did is wait as well.
   */
  waitS: Float64Array;
  /** Replicas times seconds that they were there, and that they ran jobs. */
  replicaS: number;
  busyS: number;
  /** Attempts ended by a replica that was stopped, or that crashed. */
  interrupted: number;
  crashed: number;
  /** Jobs given up after crashes. */
  failed: number;
  /** When the last job had ended, and the trace was over. */
  endS: number;
  /** Steps of the platform's count. */
  changes: number;
  course: Course;
}

/** Kinds of event, in the order in which they come at one instant. */
const FINISH = 0;
const CRASH = 1;
const RECOVER = 2;
const DRAINED = 3;
const START = 4;
const ARRIVE = 5;
const LOOK = 6;

/** Events between two pauses, in which signals are heard. */
const BATCH = 200_000;

interface Replica {
  id: number;
  state: "starting" | "working" | "draining";
  /** Rises when it starts anew, so that what was meant for it before is told apart. */
  boot: number;
  jobs: number[];
  bornS: number;
  busySinceS: number;
}

/**
 * @param progress called now and then with the share of jobs that are over, at last with 1; it may throw to stop
 */
export async function simulate(
  trace: Trace,
  world: World,
  scaler: Scaler,
  progress: (share: number) => Promise<void> = async () => {},
): Promise<Result> {
  const run = new Run(trace, world, scaler);
  while (run.step(BATCH)) await progress(run.over / trace.arrivalS.length);
  await progress(1);
  return run.result();
}

class Run {
  /** Jobs done or failed. */
  over = 0;
  readonly #trace: Trace;
  readonly #world: World;
  readonly #scaler: Scaler;
  readonly #events = new Events();
  readonly #draw: () => number;
  readonly #course: Course;

  #configured: number;
  readonly #replicas: Replica[] = [];
  #lastId = 0;
  /** Places of working replicas that no job has. */
  #free = 0;

  /** The jobs that arrived, and how many of them were ever taken; those given back are before all. */
  #arrived = 0;
  #taken = 0;
  readonly #returned: number[] = [];
  #running = 0;
  /** Per job: whose it is, which attempt, how often it crashed. */
  readonly #owner: Int32Array;
  readonly #attempt: Int32Array;
  readonly #crashes: Uint8Array;

  readonly #waitS: Float64Array;
  #done = 0;
  #doneRunS = 0;
  #lastS = 0;
  readonly #counts = { replicaS: 0, busyS: 0, interrupted: 0, crashed: 0, failed: 0, changes: 0 };

  constructor(trace: Trace, world: World, scaler: Scaler) {
    const jobs = trace.arrivalS.length;
    this.#trace = trace;
    this.#world = world;
    this.#scaler = scaler;
    this.#draw = random(world.seed);
    this.#course = new Course(trace.forS);
    this.#configured = scaler.initial;
    this.#owner = new Int32Array(jobs);
    this.#attempt = new Int32Array(jobs);
    this.#crashes = new Uint8Array(jobs);
    this.#waitS = new Float64Array(jobs);
    for (let i = 0; i < scaler.initial; i++) this.#begin(this.#add(0), 0);
    if (jobs > 0) this.#events.add(trace.arrivalS[0], ARRIVE);
    this.#events.add(scaler.lookS, LOOK);
  }

  /** Goes on for at most so many events. @returns whether there are more */
  step(most: number): boolean {
    const { arrivalS, forS } = this.#trace;
    for (let i = 0; i < most; i++) {
      if (this.over === arrivalS.length && this.#events.nextS > forS) return false;
      if (!this.#events.next()) return false;
      this.#happen(this.#events.atS, this.#events.kind, this.#events.ref, this.#events.token);
      this.#claim(this.#events.atS);
      this.#note(this.#events.atS);
    }
    return true;
  }

  result(): Result {
    const endS = Math.max(this.#trace.forS, this.#lastS);
    for (const replica of [...this.#replicas]) this.#remove(replica, endS);
    this.#note(endS);
    return {
      ...this.#counts,
      ...{ endS, course: this.#course },
      waitS: this.#waitS.slice(0, this.#done).sort(),
    };
  }

  #happen(atS: number, kind: number, ref: number, token: number): void {
    switch (kind) {
      case ARRIVE:
        this.#arrived++;
        if (this.#arrived < this.#trace.arrivalS.length) {
          this.#events.add(this.#trace.arrivalS[this.#arrived], ARRIVE);
        }
        return;
      case FINISH:
        return this.#finish(atS, ref, token);
      case LOOK:
        return this.#look(atS);
      case RECOVER:
        return this.#recover(atS, ref);
    }
    const replica = this.#replicas.find(({ id, boot }) => id === ref && boot === token);
    if (!replica) return; // it is gone, or another by now
    if (kind === START) this.#begin(replica, atS);
    else if (kind === DRAINED) this.#stop(replica, atS);
    else if (replica.state !== "starting") this.#crash(replica, atS);
  }

  // Jobs

  get #waiting(): number {
    return this.#arrived - this.#taken + this.#returned.length;
  }

  /** Gives the first in line to replicas with room, as long as there are both. */
  #claim(atS: number): void {
    while (this.#free > 0 && this.#waiting > 0) {
      const replica = this.#replicas.find(({ state, jobs }) =>
        state === "working" && jobs.length < this.#world.concurrency
      )!;
      const job = this.#returned.shift() ?? this.#taken++;
      if (replica.jobs.length === 0) replica.busySinceS = atS;
      replica.jobs.push(job);
      this.#free--;
      this.#running++;
      this.#owner[job] = replica.id;
      this.#events.add(atS + this.#trace.runS[job], FINISH, job, ++this.#attempt[job]);
    }
  }

  #finish(atS: number, job: number, attempt: number): void {
    if (this.#attempt[job] !== attempt) return; // it was interrupted
    const replica = this.#replicas.find(({ id }) => id === this.#owner[job])!;
    this.#release(replica, job, atS);
    const { arrivalS, runS } = this.#trace;
    this.#waitS[this.#done++] = Math.max(0, atS - arrivalS[job] - runS[job]);
    this.#doneRunS += runS[job];
    this.#end(atS);
    if (replica.state === "draining" && replica.jobs.length === 0) this.#remove(replica, atS);
  }

  #end(atS: number): void {
    this.over++;
    this.#running--;
    this.#lastS = atS;
  }

  #release(replica: Replica, job: number, atS: number): void {
    replica.jobs.splice(replica.jobs.indexOf(job), 1);
    if (replica.state === "working") this.#free++;
    if (replica.jobs.length === 0) this.#counts.busyS += atS - replica.busySinceS;
  }

  /** Back in its place: those given back arrived before all that was never taken. */
  #return(job: number): void {
    this.#attempt[job]++;
    this.#running--;
    const place = this.#returned.findIndex((other) => other > job);
    this.#returned.splice(place === -1 ? this.#returned.length : place, 0, job);
  }

  /** The lease of a crashed replica's job is over. */
  #recover(atS: number, job: number): void {
    if (++this.#crashes[job] < this.#world.maxCrashes) return this.#return(job);
    this.#counts.failed++;
    this.#end(atS);
  }

  // Replicas

  #add(atS: number): Replica {
    const replica: Replica = {
      ...{ id: ++this.#lastId, state: "starting", boot: 0, jobs: [], bornS: atS, busySinceS: 0 },
    };
    this.#replicas.push(replica);
    return replica;
  }

  #begin(replica: Replica, atS: number): void {
    const { concurrency, crashesPerHour } = this.#world;
    replica.state = "working";
    this.#free += concurrency;
    if (crashesPerHour > 0) {
      const forS = -Math.log(1 - this.#draw()) / crashesPerHour * 3600;
      this.#events.add(atS + forS, CRASH, replica.id, replica.boot);
    }
  }

  /** Its jobs stay until their leases are over; the platform starts it anew. */
  #crash(replica: Replica, atS: number): void {
    this.#counts.crashed += replica.jobs.length;
    for (const job of [...replica.jobs]) {
      this.#release(replica, job, atS);
      this.#attempt[job]++;
      this.#events.add(atS + this.#world.leaseS, RECOVER, job);
    }
    if (replica.state === "draining") return this.#remove(replica, atS);
    this.#free -= this.#world.concurrency;
    replica.state = "starting";
    this.#events.add(atS + this.#world.startS, START, replica.id, ++replica.boot);
  }

  /** The platform's choice, which knows nothing of jobs. */
  #drain(atS: number): void {
    const there = this.#replicas.filter(({ state }) => state !== "draining");
    const victim = there[Math.floor(this.#draw() * there.length)];
    if (victim.state === "working") {
      this.#free -= this.#world.concurrency - victim.jobs.length;
    }
    victim.state = "draining";
    if (victim.jobs.length === 0) this.#remove(victim, atS);
    else this.#events.add(atS + this.#world.drainS, DRAINED, victim.id, victim.boot);
  }

  /** Its time to drain is over: it gives back what still runs. */
  #stop(replica: Replica, atS: number): void {
    for (const job of [...replica.jobs]) {
      this.#release(replica, job, atS);
      this.#return(job);
      this.#counts.interrupted++;
    }
    this.#remove(replica, atS);
  }

  #remove(replica: Replica, atS: number): void {
    this.#counts.replicaS += atS - replica.bornS;
    if (replica.jobs.length > 0) this.#counts.busyS += atS - replica.busySinceS;
    this.#replicas.splice(this.#replicas.indexOf(replica), 1);
  }

  // Looks

  #look(atS: number): void {
    const next = this.#scaler.look(this.#seen(atS));
    if (next !== this.#configured) this.#counts.changes++;
    for (; this.#configured < next; this.#configured++) {
      const { id, boot } = this.#add(atS);
      this.#events.add(atS + this.#world.startS, START, id, boot);
    }
    for (; this.#configured > next; this.#configured--) this.#drain(atS);
    this.#events.add(atS + this.#scaler.lookS, LOOK);
  }

  #seen(atS: number): Look {
    const working = this.#replicas.filter(({ state }) => state === "working").length;
    const busy = this.#replicas.filter(({ jobs }) => jobs.length > 0).length;
    const oldest = this.#returned[0] ?? this.#taken;
    return {
      at_ms: atS * 1000,
      queue: {
        work: [{
          ...{ queue: "default", kind: "job", paused: false, served: true },
          ...{ max_running: null, rate_room: null },
          ...{ queued: this.#waiting, running: this.#running, running_here: this.#running },
          oldest_wait_s: this.#waiting > 0 ? atS - this.#trace.arrivalS[oldest] : null,
          mean_run_s: this.#done > 0 ? this.#doneRunS / this.#done : null,
        }],
        workers: { reporting: working, busy, concurrency: this.#world.concurrency },
      },
      platform: { configured: this.#configured, running: working, crashed: 0 },
    };
  }

  #note(atS: number): void {
    this.#course.note(atS, this.#waiting, this.#replicas.length);
  }
}

/** The line and the replicas over time: the largest of each in each of some hundred parts. */
export class Course {
  static readonly PARTS = 400;
  waiting = new Float64Array(Course.PARTS);
  replicas = new Float64Array(Course.PARTS);
  /** Seconds of a part. Doubles when the time does not fit any more. */
  partS: number;
  #part = 0;
  #last = [0, 0];

  constructor(forS: number) {
    this.partS = Math.max(1, forS) / (Course.PARTS - 1);
  }

  note(atS: number, waiting: number, replicas: number): void {
    while (atS >= this.partS * Course.PARTS) this.#double();
    const part = Math.floor(atS / this.partS);
    while (this.#part < part) {
      this.#part++;
      this.#raise(this.#last[0], this.#last[1]);
    }
    this.#raise(waiting, replicas);
    this.#last[0] = waiting;
    this.#last[1] = replicas;
  }

  #raise(waiting: number, replicas: number): void {
    const part = this.#part;
    if (waiting > this.waiting[part]) this.waiting[part] = waiting;
    if (replicas > this.replicas[part]) this.replicas[part] = replicas;
  }

  #double(): void {
    for (const values of [this.waiting, this.replicas]) {
      for (let part = 0; part < Course.PARTS; part++) {
        const [a, b] = [values[2 * part] ?? 0, values[2 * part + 1] ?? 0];
        values[part] = Math.max(a, b);
      }
    }
    this.partS *= 2;
    this.#part = Math.floor(this.#part / 2);
  }
}
